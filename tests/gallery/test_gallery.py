"""The gallery's files belong together, and are not older than what draws reports; the tour's commands print what it says."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from ddpdoctor.demo import find_fault
from ddpdoctor.plain import plain
from ddpdoctor.report.read import read_diagnosis

from . import gallery

PAGES = [gallery.ROOT / "README.md", *gallery.DOCS.glob("*.md")]
REPORTS = {f"{name}.{kind}" for name in gallery.FAULTS for kind in ("html", "webp")}
ANEW = "`make gallery` makes them anew"


def test_there_are_eight_faults_and_a_healthy_job():
    assert len(gallery.FAULTS) == 9 and find_fault("healthy").name in gallery.FAULTS
    shown = {*gallery.PICTURES.values(), *(name for name, _ in gallery.PARTS.values())}
    assert shown <= set(gallery.FAULTS)


@pytest.mark.parametrize("name", gallery.EDITS)
def test_the_fixes_fit_the_script(name):
    compile(gallery.fixed_script(name), name, "exec")


@pytest.mark.parametrize("names_fault", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_a_kept_run_stays_and_a_new_one_has_a_new_run_of_its_fix(tmp_path, monkeypatch, kept, names_fault):
    from . import __main__ as making

    rule = find_fault("barrier").expected_rule if names_fault else "another/rule"
    monkeypatch.setattr(
        making, "read_diagnosis", lambda _: SimpleNamespace(verdict=SimpleNamespace(rule=rule))
    )
    monkeypatch.setattr(making, "_record", lambda name, run: written(run, "new"))
    monkeypatch.setattr(making, "_ddpdoctor", lambda *words: written(words[2], "new"))

    def written(run, text):
        run.mkdir()
        (run / "diagnosis.json").write_text(text)

    for name in ("barrier", "barrier-fixed") if kept else ("barrier-fixed",):
        written(tmp_path / name, "kept")
    assert making._is_recorded("barrier", tmp_path) is names_fault
    found = {file.parent.name: file.read_text() for file in tmp_path.glob("*/diagnosis.json")}
    age = "kept" if kept else "new"
    assert found == {"barrier": age} | ({"barrier-fixed": age} if kept or names_fault else {})


def test_each_picture_has_a_source():
    have = {file.name for file in gallery.FOLDER.iterdir()}
    assert have == {*REPORTS, *gallery.PICTURES, *gallery.PARTS, gallery.MADE.name}, ANEW
    named = {
        name
        for page in PAGES
        for name in re.findall(r"\bgallery/([\w.-]+)", page.read_text(encoding="utf-8"))
    }
    assert named - {"gallery.py"} <= have and {*gallery.PICTURES, *gallery.PARTS} <= named


def test_no_picture_is_older_than_the_templates():
    assert gallery.made()["templates"] == gallery.templates_digest(), f"a template has changed: {ANEW}"


def test_the_gallery_is_small():
    assert sum(file.stat().st_size for file in gallery.FOLDER.iterdir()) < gallery.MOST_BYTES


def test_the_page_says_what_was_made():
    assert gallery.PAGE.read_text(encoding="utf-8") == gallery.page(gallery.made())


@pytest.mark.parametrize("name", gallery.FAULTS)
def test_each_report_has_the_planted_fault_and_no_name(name):
    report = gallery.FOLDER / f"{name}.html"
    diagnosis = read_diagnosis(report)
    assert diagnosis.verdict.rule == find_fault(name).expected_rule
    assert plain(diagnosis.verdict.headline) == gallery.made()["reports"][name]["verdict"]
    assert not re.findall(r"/(?:home|root|work|tmp)/[\w./-]+", report.read_text(encoding="utf-8"))


def test_readme_is_short():
    assert len((gallery.ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_pictures_load_nothing():
    for file in gallery.FOLDER.glob("*.svg"):
        assert not re.findall(r"(?:url|href)\W{0,3}https?:", file.read_text(encoding="utf-8")), file


def test_the_tour_prints_what_it_says():
    text = gallery.TOUR.read_text(encoding="utf-8")
    assert gallery.refreshed(text) == text, ANEW
    outputs = " ".join(word for found in gallery.BLOCK.finditer(text) for word in found[3].split())
    prose = gallery.BLOCK.sub("", text)
    numbers = re.findall(r"\d[\d.]* ms", prose)
    assert numbers and not [number for number in numbers if number not in outputs]
