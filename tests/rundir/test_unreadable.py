"""What lies in a run directory and may not be read, is no file, or has no time: it costs what it held, and one sentence says so."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.cli import digest, history
from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.errors import UnusableInput
from tests.privileges import as_anybody

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "slow-data-one-rank"
OPTIONS = Options(cache=False, jobs=1)
RANK, HOST = "ranks/00001", "hosts/host1"


@pytest.fixture
def run(tmp_path) -> Iterator[Path]:
    copied = Path(shutil.copytree(FIXTURE, tmp_path / "run"))
    yield copied
    for folder, names, _ in os.walk(copied):
        for name in names:
            (Path(folder) / name).chmod(0o700)


def diagnosed(path: Path) -> Diagnosis:
    with as_anybody():
        return analyze(str(path), OPTIONS)


def closed(path: Path) -> None:
    path.chmod(0)


def listed_only(path: Path) -> None:
    path.chmod(0o400)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def bound(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as end:
        folder = os.open(path.parent, os.O_PATH)
        end.bind(f"/proc/self/fd/{folder}/{path.name}")  # no longer than a socket's name may be
        os.close(folder)


@pytest.mark.parametrize("spoil", [closed, listed_only])
def test_a_ranks_closed_folder_is_as_a_missing_rank(run, spoil):
    spoil(run / RANK)
    found = diagnosed(run)
    assert found.notes == [
        f"Rank 1: {run}/{RANK} cannot be read (Permission denied): what this rank recorded is not read."
    ]
    (run / RANK).chmod(0o700)
    shutil.rmtree(run / RANK)
    missing = analyze(str(run), OPTIONS)
    assert (found.job.ranks_seen, found.job.missing_ranks) == ([0], [1])
    assert missing.notes == [f"Rank 1: {run}/{RANK} is missing: what this rank recorded is not here."]
    assert (found.facts, found.findings, found.verdict) == (missing.facts, missing.findings, missing.verdict)


@pytest.mark.parametrize(
    ("spoil", "name", "words"),
    [
        (closed, f"{RANK}/rank.json", "(Permission denied): how this rank is set up is not known."),
        (closed, f"{RANK}/steps.jsonl", "(Permission denied): the steps of 1 of 2 ranks"),
        (closed, f"{RANK}/trace.json.gz", "permission denied"),
        (fifo, f"{RANK}/trace.json.gz", "is no regular file: this rank's profiler window is not read."),
        (closed, "manifest.json", "how the job was started, and how it ended, is not known."),
        (closed, "hosts", "telemetry, and how ranks' processes ended, is not known."),
        (closed, HOST, "telemetry, and how ranks' processes ended, is not known."),
        (closed, f"{HOST}/telemetry.jsonl", "what its processors, memory and GPUs did is not known."),
        (fifo, f"{HOST}/telemetry.jsonl", "(it is no regular file): what its processors, memory"),
        *(
            (spoil, f"{RANK}/samples.jsonl", "at which source lines this rank spends its time is known from")
            for spoil in (closed, fifo, bound)
        ),
    ],
)
def test_each_file_costs_what_it_held_and_one_sentence(run, spoil, name, words):
    spoil(run / name)
    found = diagnosed(run)
    assert found.steps.count > 0
    (note,) = [note for note in found.notes if str(run / name) in note]
    assert words in note, found.notes


@pytest.mark.parametrize(
    "name", ["faults.txt", "calls.jsonl", "ending.json", "trace.1.json.gz", "trace.columns"]
)
def test_so_do_files_of_a_rank_that_stopped_and_further_windows(run, name):
    os.mkfifo(run / RANK / name)
    (note,) = [note for note in diagnosed(run).notes if name in note]
    assert "no regular file" in note


def test_all_ranks_closed_is_the_reason_why_there_is_nothing(run):
    for folder in (run / "ranks").iterdir():
        folder.chmod(0)
    with pytest.raises(
        UnusableInput, match=r"run: Ranks 0 and 1: \S+/ranks/\* cannot be read \(Permission denied\)"
    ):
        diagnosed(run)


def test_runs_around_one_that_is_closed(run, tmp_path):
    """Of a folder with runs, what cannot be looked into is told, by whoever looks for runs or reports there."""
    nightly = tmp_path / "nightly"
    shutil.move(run, nightly / "1")
    (nightly / "2").mkdir(mode=0)
    (nightly / "report.json").write_text("{}")
    (nightly / "report.json").chmod(0)
    told = f"The folder {nightly}/2 cannot be read (permission denied): its contents are skipped."
    assert told in diagnosed(nightly).notes
    with as_anybody():
        done = CliRunner().invoke(history.command, [str(nightly), "--json", "-"], catch_exceptions=False)
    assert json.loads(done.stdout)["notes"] == [
        told.removesuffix("."),
        f"skipped: {nightly}/report.json cannot be read: permission denied",
    ]
    shutil.move(nightly / "1", run)
    for read in (diagnosed, _history):
        with pytest.raises(UnusableInput, match=f"The folder {nightly}/2 cannot be read"):
            read(nightly)


def _history(path: Path) -> None:
    with as_anybody():
        CliRunner().invoke(history.command, [str(path)], catch_exceptions=False)


@pytest.mark.parametrize(
    "name", [RANK, f"{RANK}/rank.json", f"{RANK}/trace.json.gz", "hosts", "manifest.json"]
)
def test_a_digest_is_made_of_what_can_be_read(run, tmp_path, name):
    (run / name).chmod(0)
    with as_anybody():
        done = CliRunner().invoke(digest.command, [str(run), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0 and f"{run / name} cannot be" in done.stderr
    left = tmp_path / "out" / name
    assert not left.exists() or json.loads(left.read_bytes()).keys() == {"schema", "notes", "note_codes"}
    assert analyze(str(tmp_path / "out"), OPTIONS).steps.count > 0


def changed(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(line)) + "\n" for line in lines))


@pytest.mark.parametrize("t_ns", [0, 5 * 10**9, None, -1, "x"])
def test_telemetry_without_a_time_is_left_out_and_told(run, t_ns):
    whole = analyze(str(run), OPTIONS)
    telemetry, first = run / HOST / "telemetry.jsonl", True

    def one(line: dict[str, Any]) -> dict[str, Any]:
        nonlocal first
        if "ranks" not in line or not first:
            return line
        first = False
        return {**line, "t_ns": t_ns}

    changed(telemetry, one)
    found = analyze(str(run), OPTIONS)
    (note,) = found.notes
    assert f"{telemetry}: 1 of " in note and "samples have no time" in note and "not known" not in note
    last = [series.t_s[-1] for series in whole.telemetry]
    assert [series.t_s[-1] for series in found.telemetry] == last, (
        "the samples behind it stay where they were"
    )
    changed(telemetry, lambda line: {**line, "t_ns": t_ns} if "ranks" in line else line)
    found = analyze(str(run), OPTIONS)
    (note,) = found.notes
    assert "are left out: what its processors, memory and GPUs did is not known." in note
    assert found.facts["host"]["cpu_percent"] is None and found.telemetry == []


def test_stack_samples_without_a_time_are_left_out_and_told(run):
    samples = run / RANK / "samples.jsonl"
    changed(samples, lambda line: {**line, "t": 0} if "t" in line else line)
    (note,) = analyze(str(run), OPTIONS).notes
    assert str(samples) in note and "dated more than a year away from this rank's steps" in note
    assert "is known from its recorded calls alone" in note


@pytest.mark.parametrize("times", [[0, 0], [7, 7]])
def test_a_step_that_takes_no_time_is_left_out_and_told(run, times):
    """It was taken for one, and what was said was that a rank's collectives are missing."""
    steps = run / RANK / "steps.jsonl"
    changed(steps, lambda line: {**line, "t": times} if line.get("step") == 30 else line)
    assert analyze(str(run), OPTIONS).notes == [
        f"{steps}: 1 step that does not end after its beginning left out."
    ]
