"""Unreadable inputs and unwritable outputs are one sentence and leave no partial files."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir.reader import RunDirectory
from ddpdoctor.trace import find_traces
from tests.commands import command
from tests.trace.trace_files import document, event, events, write

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "fixtures" / "barrier"
LONG = "x" * 400
OPTIONS = Options(cache=False, jobs=1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["analyze", LONG],
        ["analyze", f"{LONG}/rank0.json"],
        ["compare", LONG, FIXTURE],
        ["export", LONG, "--timeline", "t.json"],
        ["digest", LONG],
        ["analyze", FIXTURE, "--json", LONG],
        ["analyze", FIXTURE, "--rules", LONG],
    ],
    ids=lambda arguments: " ".join(map(str, arguments)).replace(LONG, "LONG").replace(str(ROOT), ""),
)
def test_a_name_that_is_too_long(tmp_path, arguments):
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("ddpdoctor: ") and done.stderr.lower().rstrip(".\n").endswith(
        "file name too long"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "A", "B", "--fail-on-regression"],
        ["history", "A", "--fail-on-regression"],
        ["watch", "A", "--interval"],
        ["run", "--hang-after"],
        ["run", "--telemetry-interval"],
        ["try", "--set", "torch.threads=1", "--budget"],
    ],
    ids=" ".join,
)
def test_nan_is_refused(tmp_path, arguments):
    for number in ("nan", "inf", "-nan"):
        done = command(*arguments, number, cwd=tmp_path)
        assert done.returncode == 2 and f"{number} is not a finite number." in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_device_is_refused_and_a_fifo_is_read(tmp_path):
    with pytest.raises(UnusableInput, match=r"/dev/zero is a device or a socket, not a file\."):
        analyze("/dev/zero", OPTIONS)
    write(tmp_path / "rank0.json", document(events()))
    done = subprocess.run(
        ["/bin/bash", "-c", f"{sys.executable} -m ddpdoctor analyze <(cat rank0.json)"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr


def refusing(monkeypatch, place):
    """Have the operating system refuse to list ``place``: a test may run as root, who may read everything."""
    listing, scanning = os.listdir, os.scandir

    def refuse(real):
        def call(path="."):
            if os.fspath(path) == str(place):
                raise PermissionError(13, "Permission denied", str(place))
            return real(path)

        return call

    monkeypatch.setattr(os, "listdir", refuse(listing))
    monkeypatch.setattr(os, "scandir", refuse(scanning))


def test_an_unreadable_folder_is_reported(tmp_path, monkeypatch):
    refusing(monkeypatch, tmp_path)
    with pytest.raises(UnusableInput, match=rf"^{tmp_path} cannot be read: permission denied\.$"):
        find_traces([str(tmp_path)])


def test_an_unreadable_folder_inside_is_noted(tmp_path, monkeypatch):
    write(tmp_path / "rank0.json", document([event()]))
    (tmp_path / "lost+found").mkdir()
    refusing(monkeypatch, tmp_path / "lost+found")
    found = find_traces([str(tmp_path)])
    assert len(found.files) == 1
    assert found.notes == (
        f"The folder {tmp_path}/lost+found cannot be read (permission denied): its contents are skipped.",
    )


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("ranks", "what the ranks recorded is not read"),
        ("hosts", "telemetry, and how ranks' processes ended, is not known"),
    ],
)
def test_an_unreadable_part_of_a_run_is_noted(tmp_path, monkeypatch, name, lost):
    run = shutil.copytree(FIXTURE, tmp_path / "run")
    refusing(monkeypatch, run / name)
    said = f"{run}/{name} cannot be read (Permission denied): {lost}."
    assert said in map(str, RunDirectory.open(str(run)).notes)
    if name == "ranks":
        with pytest.raises(UnusableInput, match=f"^{re.escape(f'{run}: {said}')}$"):
            analyze(str(run), OPTIONS)


def test_skipped_files_are_named(tmp_path):
    write(tmp_path / "rank0.json.gz", document([event()]))
    (tmp_path / "rank1.json.gz").write_bytes(b"")
    (tmp_path / "rank2.json").write_bytes('{"traceEvents": []}'.encode("utf-16"))
    (note,) = find_traces([str(tmp_path)]).notes
    assert note == (
        "2 JSON file(s) hold no profiler events and were skipped: "
        f"{tmp_path}/rank1.json.gz, {tmp_path}/rank2.json."
    )
    (tmp_path / "rank0.json.gz").unlink()
    with pytest.raises(UnusableInput, match=r"2 JSON file\(s\) hold no profiler events: .*rank1.json.gz"):
        find_traces([str(tmp_path)])


def test_a_refused_connection_is_reported():
    pytest.importorskip("aiohttp")
    with pytest.raises(UnusableInput, match=r"127\.0\.0\.1:9/x\.json cannot be opened: Cannot connect"):
        find_traces(["http://127.0.0.1:9/x.json"])


def test_a_run_without_ranks_says_so_once(tmp_path):
    (tmp_path / "manifest.json").write_text(
        '{"schema": "ddpdoctor.run/1", "notes": ["no rank was recorded: true ended."]}'
    )
    with pytest.raises(UnusableInput, match=f"^{tmp_path}: no rank was recorded: true ended.$"):
        analyze(str(tmp_path), OPTIONS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["export", FIXTURE, "--parquet", "out"], "cannot write out/steps.parquet: File too large"),
        (["digest", FIXTURE, "--out", "out"], f"{FIXTURE} cannot be copied to out: file too large."),
    ],
)
def test_a_full_disk_is_one_sentence_and_leaves_no_partial_file(tmp_path, arguments, says):
    done = command(*arguments, cwd=tmp_path, most_bytes=4 << 10)
    assert (done.returncode, done.stderr) == (2, f"ddpdoctor: {says}\n")
    left = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert all(file.suffix in (".parquet", ".sha256") and file.stat().st_size for file in left)
    assert arguments[0] == "export" or not (tmp_path / "out").exists()


@pytest.mark.extended
def test_an_interrupt_is_silent(tmp_path):
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", document(events(15_000), rank=rank))
    process = subprocess.Popen(
        [sys.executable, "-m", "ddpdoctor", "analyze", "--no-cache", "--jobs", "2", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None and not children.read_text():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and not err.strip()


def test_a_step_that_ends_before_it_begins_is_excluded_with_a_note(tmp_path, recwarn):
    run = Path(shutil.copytree(FIXTURE, tmp_path / "run"))
    log = run / "ranks/00001/steps.jsonl"
    log.write_text(log.read_text() + '{"step":999,"t":[2000000000000000000,1]}\n{"step":1000,"t":[1]}\n')
    found = analyze(str(run), OPTIONS)
    assert f"{log}: 2 steps that do not end after their beginning left out." in found.notes
    assert not [warning for warning in recwarn if warning.category is RuntimeWarning]
