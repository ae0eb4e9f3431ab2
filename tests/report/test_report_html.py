"""Escaping, self-containment, size and embedded data of the HTML report."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser

import jsonschema
import msgspec
import pytest
import samples
from packed import unpacked

from ddpdoctor.diagnose.diagnosis import CheckedRule, Diagnosis, SkippedRule, Verdict
from ddpdoctor.errors import DdpDoctorError, UnusableInput
from ddpdoctor.report.compare import compare
from ddpdoctor.report.html import THINNED_NOTE, page, render_html, write_html
from ddpdoctor.report.json_output import to_json, write_json
from ddpdoctor.report.read import read_diagnosis
from ddpdoctor.report.runs_output import render_comparison

BYTES_MOST = 1_500_000
MORE_MOST = 700_000
"""Most bytes that interactive charts add."""


class Document(HTMLParser):
    """Every element with its attributes, and the text by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append((self.elements[-1][0] if self.elements else "", data))

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(
    scope="module", params=[(name, static) for name in sorted(samples.ALL) for static in (False, True)]
)
def report(request):
    name, static = request.param
    return render_html(samples.ALL[name](), static=static)


@pytest.mark.parametrize("name", sorted(samples.ALL))
@pytest.mark.extended
def test_the_report_is_small(name):
    still, whole = (len(render_html(samples.ALL[name](), static=static).encode()) for static in (True, False))
    assert still <= BYTES_MOST
    assert whole - still <= MORE_MOST


def test_a_static_report_has_no_chart_library():
    still, whole = (render_html(samples.unhealthy(), static=static) for static in (True, False))
    for mark in ("ddpdoctor-plotly", "ddpdoctor-figures", "interactive", "to-steps"):
        assert mark in whole and mark not in still
    # Where there is nothing to look closer at, nothing to draw it is carried either.
    assert render_html(samples.minimal()) == render_html(samples.minimal(), static=True)


def test_nothing_points_outside_the_file(report):
    document = Document(report)
    for tag, attributes in document.elements:
        for name in ("src", "srcset", "poster", "data", "action", "background", "xlink:href", "ping"):
            assert name not in attributes, (tag, attributes)
        if "href" in attributes:
            assert tag == "a"
            assert re.match(r"https://|#", attributes["href"]), attributes
            if attributes["href"].startswith("https:"):
                assert "noopener" in attributes["rel"]
    assert not document.named("link") and not document.named("img") and not document.named("iframe")
    style = "".join(text for tag, text in document.texts if tag == "style")
    assert "@import" not in style and "//" not in style
    assert set(re.findall(r"url\((.*?)\)", style)) == {"#wait", "#gone"}


def test_no_attribute_has_script_or_style(report):
    for _, attributes in Document(report).elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]


def test_the_policy_allows_exactly_the_inline_style_and_script(report):
    document = Document(report)
    policy = next(
        a["content"] for a in document.named("meta") if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy and "http" not in policy and "blob" not in policy
    draws = "ddpdoctor-plotly" in report
    for tag in ("style", "script"):
        texts = re.findall(rf"<{tag}(?! type)[^>]*>(.*?)</{tag}>", report, re.DOTALL)
        assert len(texts) == 1 + draws
        if tag == "script" and draws:
            packed = re.search(r'id="ddpdoctor-plotly">(.*?)</script>', report)
            texts.append(unpacked(packed[1]))
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
        assert f"{tag}-src {allowed};" in policy


def test_hostile_names_stay_text():
    document = Document(render_html(samples.hostile()))
    assert len(document.named("script")) == 5, "data, figures and library, and two that run"
    assert not document.named("img")
    assert not any("alert" in key for _, attributes in document.elements for key in attributes)
    shown = "".join(text for _, text in document.texts)
    assert shown.count("</script><img src=x onerror=alert(1)>") > 20


def test_backticks_become_code_in_headings_and_sentences():
    text = "No step calls `no_sync()`"
    unhealthy = samples.unhealthy()
    told = [msgspec.structs.replace(finding, title=text) for finding in unhealthy.findings]
    diagnosis = msgspec.structs.replace(
        unhealthy,
        verdict=Verdict(unhealthy.verdict.rule, text),
        findings=told,
        notes=[text],
        checked=[CheckedRule("a/b", text)],
        skipped=[SkippedRule("a/c", text, text)],
        waterfall=[msgspec.structs.replace(bar, label=text) for bar in unhealthy.waterfall],
    )
    pages = [render_html(diagnosis, static=True), render_comparison(compare(diagnosis, diagnosis))]
    for text in pages:
        shown = re.sub(r"(?s)<(script|style|pre)\b.*?</\1>", "", text)
        assert "no_sync()" in shown and not re.findall(r".{0,40}`.{0,40}", shown)
    assert "<title>ddpdoctor: No step calls no_sync()</title>" in pages[0]
    assert "calls <code>no_sync()</code></h1>" in pages[0]


def test_ids_are_unique_and_internal_links_have_targets(report):
    document = Document(report)
    ids = [attributes["id"] for _, attributes in document.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = {a["href"][1:] for a in document.named("a") if a["href"].startswith("#")}
    for _, attributes in document.elements:
        wanted |= set((attributes.get("aria-labelledby") or "").split())
    assert wanted <= set(ids)


def test_headings_do_not_skip_a_level_and_images_have_names(report):
    document = Document(report)
    levels = [int(tag[1]) for tag, _ in document.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    for attributes in document.named("svg"):
        if attributes.get("role") == "img":
            assert attributes.get("aria-label") or attributes.get("aria-labelledby")


@pytest.mark.parametrize("name", ["unhealthy", "healthy", "minimal", "hostile"])
def test_a_report_contains_its_diagnosis(name, tmp_path):
    diagnosis = samples.ALL[name]()
    write_html(diagnosis, tmp_path / "report.html")
    write_json(diagnosis, tmp_path / "diagnosis.json")
    assert read_diagnosis(tmp_path / "report.html") == diagnosis
    assert read_diagnosis(tmp_path / "diagnosis.json") == diagnosis
    jsonschema.validate(json.loads((tmp_path / "diagnosis.json").read_text()), msgspec.json.schema(Diagnosis))


@pytest.mark.extended
def test_a_large_report_contains_a_thinned_copy_with_a_note(tmp_path):
    diagnosis = samples.large()
    write_html(diagnosis, tmp_path / "report.html")
    copy = read_diagnosis(tmp_path / "report.html")
    assert copy.findings == diagnosis.findings and copy.ranks == diagnosis.ranks
    assert set(copy.series.ranks) >= {137, 300} and 0 < len(copy.series.ranks) < 512
    assert THINNED_NOTE in copy.notes and THINNED_NOTE not in diagnosis.notes


def test_infinities_become_null(tmp_path):
    diagnosis = msgspec.structs.replace(samples.minimal(), facts={"x": float("inf")})
    write_json(diagnosis, tmp_path / "diagnosis.json")
    assert json.loads((tmp_path / "diagnosis.json").read_text())["facts"] == {"x": None}


def test_file_names_that_are_not_utf8_can_be_written(tmp_path):
    diagnosis = msgspec.structs.replace(
        samples.minimal(), source=["run-\udce9"], verdict=Verdict(None, "\udce9")
    )
    for write, name in ((write_html, "report.html"), (write_json, "diagnosis.json")):
        write(diagnosis, tmp_path / name)
        assert read_diagnosis(tmp_path / name).source == ["run-\\udce9"]


def test_an_existing_file_is_replaced_atomically(tmp_path):
    target = tmp_path / "report.html"
    write_html(samples.unhealthy(), target)
    write_html(samples.minimal(), target)
    assert read_diagnosis(target) == samples.minimal()
    assert target.read_text().startswith("<!DOCTYPE html>")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_a_missing_folder_is_one_sentence(tmp_path):
    with pytest.raises(DdpDoctorError, match=r"cannot write .*report\.html: No such file"):
        write_html(samples.minimal(), tmp_path / "missing" / "report.html")


def _bad(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UnusableInput) as raised:
        read_diagnosis(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)
    return str(raised.value)


def test_unusable_input_is_one_clear_sentence_each(tmp_path):
    whole = render_html(samples.unhealthy(), static=True)
    data = json.dumps({"schema": "ddpdoctor.diagnosis/2", "brand": "new"})
    assert "newer ddpdoctor" in _bad(tmp_path, "newer.json", data)
    assert "newer ddpdoctor" in _bad(
        tmp_path, "newer.html", whole.replace('ddpdoctor.diagnosis/1"', 'ddpdoctor.diagnosis/7"')
    )
    assert "is not ddpdoctor.diagnosis/1" in _bad(tmp_path, "other.json", '{"schema": "ddpdoctor.run/1"}')
    for share in (0.3, 0.6, 0.9):
        assert "truncated" in _bad(tmp_path, f"cut-{share}.html", whole[: int(len(whole) * share)])
    assert "truncated" in _bad(tmp_path, "cut.json", msgspec.json.encode(samples.unhealthy())[:900])
    assert "not a ddpdoctor report" in _bad(tmp_path, "page.html", "<!doctype html><title>x</title>")
    assert "not a ddpdoctor diagnosis" in _bad(tmp_path, "list.json", "[1, 2]")
    assert "neither" in _bad(tmp_path, "noise.bin", bytes(range(1, 200)))
    assert "does not follow" in _bad(
        tmp_path, "wrong.json", '{"schema": "ddpdoctor.diagnosis/1", "healthy": "yes"}'
    )
    assert "empty" in _bad(tmp_path, "empty.json", "")
    with pytest.raises(UnusableInput, match="cannot be read"):
        read_diagnosis(tmp_path / "absent.html")


def test_fields_of_later_versions_are_ignored(tmp_path):
    data = msgspec.to_builtins(samples.unhealthy()) | {"added_later": 1}
    (tmp_path / "diagnosis.json").write_bytes(msgspec.json.encode(data))
    assert isinstance(read_diagnosis(tmp_path / "diagnosis.json"), Diagnosis)


def test_long_names_in_the_headline_can_be_wrapped():
    long = msgspec.structs.replace(
        samples.unhealthy(),
        verdict=Verdict(None, "job.py:5 in `Images.read_slow` <b_c.d> f(x) 0.5 ms " + 8 * "long_"),
    )
    heading = re.search(r"<h1[^>]*>(.*?)</h1>", render_html(long))[1]
    name = "job.py:5 in <code>Images.<wbr>read_slow</code> &lt;b_c.<wbr>d&gt; f<wbr>(x)"
    assert heading == f"{name} 0.5\xa0ms {8 * 'long_<wbr>'}", (
        "a name breaks at underscores only if it is long"
    )


def test_marks_of_writing_direction_are_escaped_in_json() -> None:
    told = "a\u202egnp.exe\u2066 \u061c\u200e – …"
    diagnosis = msgspec.structs.replace(samples.minimal(), notes=[told])
    for data in (
        to_json(diagnosis).decode(),
        msgspec.json.format(to_json(diagnosis)).decode(),
        render_html(diagnosis),
    ):
        assert not any(mark in data for mark in "\u202e\u2066\u061c\u200e")
    assert json.loads(to_json(diagnosis))["notes"] == [told]


def test_the_first_screen_has_the_finding_of_the_verdict():
    assert page(samples.unhealthy()).main.anchor == "finding-1"
    assert page(samples.healthy()).main is None and page(samples.minimal()).main is None


def test_only_chosen_settings_and_those_of_findings_are_open():
    """A finding reads num_workers; the other settings of the sample that have defaults are at them, but for the batch size."""
    opened = {group.title: group.rows for group in page(samples.unhealthy()).job if not group.folded}
    (chosen,) = (rows for title, rows in opened.items() if title.startswith("Settings"))
    assert chosen == [("DataLoader", "num_workers 0, batch_size 64")]
    assert "Environment" not in opened
