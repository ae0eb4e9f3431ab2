"""What is replaced: only what ddpdoctor wrote in this very form. docs/writes.md has a row for each form and command here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ddpdoctor import written
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.written import LIST, WrittenFolder, check_file, write_file

HEADS = {
    written.DIAGNOSIS: b'{\n "schema": "ddpdoctor.diagnosis/1"}',
    written.COMPARISON: b'{"schema":"ddpdoctor.comparison/1"}',
    written.HISTORY: b'{"schema": "ddpdoctor.history/1"}',
    written.TRIALS: b'{\n  "schema": "ddpdoctor.trials/1"}',
    written.DOCTOR: b'{"schema":"ddpdoctor.doctor/1"}',
    written.SARIF: b'{"$schema": "x", "version": "2.1.0", "runs": [{"tool": {"driver": {"name": "ddpdoctor"}}}]}',
    written.TIMELINE: b'{"displayTimeUnit":"ms","otherData":{"producer":"ddpdoctor"},"traceEvents":[]}',
    written.EVENTS: b"\x18\0\0\0\0\0\0\0crc!\t\0\0\0\0\0\0\0\0\x1a\rbrain.Event:2crc!",
}
FORMS = [form for form in vars(written).values() if isinstance(form, written.Form)]
OTHERS = {
    "script": b"import torch\n",
    "other JSON": b'{"schema": "mine", "note": "ddpdoctor.diagnosis/1"}',
    "manifest": b'{"schema":"ddpdoctor.run/1"}',
    "other page": b'<!DOCTYPE html>\n<meta name="generator" content="ddpdoctor">\n',
    "seal inside": b"\n<!-- ddpdoctor report sha256:" + b"0" * 64 + b" -->\nmine\n",
    "binary": bytes(range(256)) * 40,
    "gzip": b"\x1f\x8b\x08\0" + b"\0" * 20,
}


def of(form: written.Form) -> bytes:
    return HEADS.get(form, b"text\n")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.words)
def test_a_form_replaces_itself_and_nothing_else(tmp_path, form):
    file = tmp_path / "out"
    for content in (of(form), of(form) + b" "):
        write_file(file, content, form)
        assert file.read_bytes().startswith(content)
    for other in FORMS:
        if other is not form:
            with pytest.raises(
                DdpDoctorError,
                match=r"out is not .* that ddpdoctor wrote: name another file\.$",
            ):
                write_file(file, of(other), other)
    assert file.read_bytes().startswith(of(form))
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.words)
@pytest.mark.parametrize("other", OTHERS)
def test_a_file_of_the_user_stays(tmp_path, form, other):
    file = tmp_path / "train.py"
    file.write_bytes(OTHERS[other])
    for act in (lambda: check_file(file, form), lambda: write_file(file, of(form), form)):
        with pytest.raises(DdpDoctorError, match=r"train\.py .* name another file\.$"):
            act()
    assert file.read_bytes() == OTHERS[other]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("form", [form for form in FORMS if form.head is None], ids=lambda form: form.words)
def test_what_was_edited_since_stays(tmp_path, form):
    file = tmp_path / "out"
    write_file(file, "the verdict\n", form)
    file.write_bytes(file.read_bytes().replace(b"verdict", b"verdict, as we see it"))
    edited = file.read_bytes()
    with pytest.raises(DdpDoctorError, match="was changed after ddpdoctor wrote it"):
        write_file(file, "the verdict\n", form)
    assert file.read_bytes() == edited


def test_an_empty_file_is_replaced(tmp_path):
    for form in FORMS:
        file = tmp_path / form.words.replace(" ", "-")
        file.touch()
        write_file(file, of(form), form)
        assert file.stat().st_size


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda place: place.mkdir(), "Is a directory"),
        (lambda place: place.symlink_to("mine.txt"), "is not an HTML report"),
        (lambda place: place.symlink_to("run/manifest.json"), "recorded run"),
        (lambda place: place.hardlink_to("mine.txt"), "is not an HTML report"),
        (lambda place: os.mknod(place, 0o140600), "a disk or a socket"),
    ],
    ids=["folder", "link", "link into a recording", "hard link", "socket"],
)
def test_what_is_no_report_in_the_place_of_one(tmp_path, monkeypatch, make, says):
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("mine")
    Path("run/ranks/00000").mkdir(parents=True)
    Path("run/manifest.json").write_text('{"schema": "ddpdoctor.run/1"}')
    make(Path("report.html"))
    kind = os.lstat("report.html").st_mode
    for act in (check_file, lambda path, form: write_file(path, "new", form)):
        with pytest.raises(DdpDoctorError, match=says):
            act("report.html", written.REPORT)
    assert Path("mine.txt").read_text() == "mine" and os.lstat("report.html").st_mode == kind


def test_another_name_of_a_report_keeps_the_old_one(tmp_path):
    write_file(tmp_path / "a", "old", written.REPORT)
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    write_file(tmp_path / "a", "new", written.REPORT)
    assert (tmp_path / "a").read_text().startswith("new") and (tmp_path / "b").read_text().startswith("old")


def test_a_way_through_proc_is_no_pipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("mine")
    with pytest.raises(DdpDoctorError, match="is not an HTML report"):
        write_file("/proc/self/cwd/train.py", "new", written.REPORT)
    assert Path("train.py").read_text() == "mine"
    with open("given", "wb") as given:
        write_file(f"/dev/fd/{given.fileno()}", "new", written.REPORT)
    assert Path("given").read_text().startswith("new")


@pytest.mark.parametrize("says", ["appeared", "changed"])
def test_what_appears_or_changes_meanwhile_stays(tmp_path, monkeypatch, says):
    from ddpdoctor.written import files

    file, judged = tmp_path / "report.html", files._check_replaceable
    if says == "changed":
        write_file(file, "old", written.REPORT)

    def late(*given):
        found = judged(*given)
        file.write_text("the user's")
        return found

    monkeypatch.setattr(files, "_check_replaceable", late)
    with pytest.raises(DdpDoctorError, match="is not an HTML report"):
        write_file(file, "new", written.REPORT)
    assert file.read_text() == "the user's"


def test_many_writers_leave_one_whole_file(tmp_path):
    file, faults = tmp_path / "report.html", []

    def write(number):
        try:
            write_file(file, f"{number}" * 100_000, written.REPORT)
        except DdpDoctorError as fault:
            faults.append(fault)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    check_file(file, written.REPORT)
    assert len(faults) < 8 and all("something else writes" in str(fault) for fault in faults)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_umask_is_kept_and_never_switched(tmp_path, monkeypatch):
    script = "import os, sys; os.umask(0o027); from ddpdoctor import written\n"
    script += "def never(mask): raise AssertionError\nos.umask = never\nwritten.write_file(sys.argv[1], 'x', written.REPORT)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "r")], check=True)
    assert (tmp_path / "r").stat().st_mode & 0o777 == 0o640


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def refused(self, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    for text in ("old", "new"):
        write_file(tmp_path / "r", text, written.REPORT)
    assert (tmp_path / "r").read_text().startswith("new")
    assert len(list(tmp_path.iterdir())) == 1


def folder(place: Path) -> WrittenFolder:
    return WrittenFolder(place / "out", "tables")


def test_a_folder_replaces_what_its_list_names(tmp_path):
    for text in (b"old", b"new"):
        folder(tmp_path).write([("a.csv", text), ("b/c.csv", text)])
    assert (tmp_path / "out/b/c.csv").read_bytes() == b"new"
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", LIST], cwd=tmp_path / "out", capture_output=True
    )
    assert done.returncode == 0, done.stderr
    folder(tmp_path).write([("d.csv", b"")])
    folder(tmp_path).check(["a.csv", "b/c.csv", "d.csv"])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda out: (out / "a.csv").write_bytes(b"edited"), "a.csv was changed after ddpdoctor wrote it"),
        (lambda out: (out / "a.csv").write_bytes(b""), "a.csv was changed"),
        (
            lambda out: (out / "new.csv").write_bytes(b"mine"),
            "new.csv is there and was not written by ddpdoctor",
        ),
        (lambda out: (out / "new.csv").mkdir(), "new.csv is there"),
        (lambda out: (out / "new.csv").symlink_to("a.csv"), "new.csv is there"),
        (lambda out: (out / LIST).unlink(), "a.csv is there"),
        (lambda out: (out / LIST).write_text("my own notes\n"), "is not a list that ddpdoctor wrote"),
        (lambda out: (out / LIST).rename(out / "x") and (out / LIST).symlink_to("x"), "cannot write"),
        (lambda out: (out / "b").symlink_to(out.parent), "no folder of tables"),
    ],
    ids=["edited", "emptied", "own", "folder", "link", "no list", "own list", "linked list", "linked folder"],
)
def test_what_a_list_does_not_name_stays(tmp_path, make, says):
    out = tmp_path / "out"
    folder(tmp_path).write([("a.csv", b"old")])
    make(out)
    before = {each: each.read_bytes() for each in out.rglob("*") if each.is_file()}
    for act in ("check", "write"):
        with pytest.raises(DdpDoctorError, match=says):
            if act == "check":
                folder(tmp_path).check(["a.csv", "new.csv", "b/c.csv"])
            else:
                folder(tmp_path).write([("new.csv", b"x"), ("b/c.csv", b"x"), ("a.csv", b"x")])
        if act == "check":
            assert {each: each.read_bytes() for each in out.rglob("*") if each.is_file()} == before


def test_a_second_process_goes_on_with_the_others_list(tmp_path):
    first, second = folder(tmp_path), folder(tmp_path)
    first.check(["a.csv"])
    second.check(["a.csv"])
    first.write([("a.csv", b"1")])
    second.write([("a.csv", b"2")])
    folder(tmp_path).check(["a.csv"])
    assert (tmp_path / "out/a.csv").read_bytes() == b"2"


def test_nothing_is_written_into_a_recording(tmp_path):
    (tmp_path / "run/ranks/00000").mkdir(parents=True)
    (tmp_path / "run/manifest.json").write_text('{"schema": "ddpdoctor.run/1"}')
    (tmp_path / "link").symlink_to("run/ranks")
    for place in ("run", "run/ranks/00000", "link/00000", "link"):
        with pytest.raises(DdpDoctorError, match="recorded run: name another folder"):
            WrittenFolder(tmp_path / place, "tables").write([("a.csv", b"")])
    assert sum(1 for _ in tmp_path.rglob("*")) == 5


@pytest.mark.parametrize("tool", [["git", "apply"], ["patch", "-p1", "-i"]], ids=["git", "patch"])
@pytest.mark.parametrize("end", ["\n", ""])
def test_a_sealed_patch_can_be_applied(tmp_path, tool, end):
    from ddpdoctor.experiment import patch_of

    if shutil.which(tool[0]) is None:
        pytest.skip(f"no {tool[0]} here")
    text = f"import torch\nloader = DataLoader(data, num_workers=0){end}"
    (tmp_path / "train.py").write_text(text)
    write_file(tmp_path / "p.diff", patch_of(text, "train.py", 2, {"loader.num_workers": 4}), written.PATCH)
    done = subprocess.run([*tool, "p.diff"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "train.py").read_text() == text.replace("=0", "=4")
