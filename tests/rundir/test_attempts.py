"""Which recordings of ranks are of one attempt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.rundir.attempts import attempts_of
from ddpdoctor.rundir.reader import RankRecord, RunDirectory, UnknownAttemptError

S = 1_000_000_000


def recorded(
    run: Path, rank: int, repeat: int = 0, *, start_s: int = 0, steps: int = 10, **fields: Any
) -> RankRecord:
    """A recording in the run directory ``run``, of a process of its own."""
    folder = run / "ranks" / (f"{rank:05d}.{repeat}" if repeat else f"{rank:05d}")
    folder.mkdir(parents=True)
    (run / "manifest.json").write_text('{"schema": "ddpdoctor.run/1"}')
    info = {"rank": rank, "host": run.name, "world_size": 2, "attempt": repeat, "job_id": "j"}
    info |= {"started_ns": start_s * S, "pid": 1000 * (repeat + 1) + rank} | fields
    (folder / "rank.json").write_text(json.dumps(info))
    lines = [{"schema": "ddpdoctor.steps/2"}, *({"step": n, "t": [n * S, (n + 1) * S]} for n in range(steps))]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RankRecord(str(folder), rank, info, repeat)


def names(run: RunDirectory) -> list[str]:
    return [Path(record.path).name for record in run.ranks]


def found(*records: RankRecord) -> list[list[str]]:
    return [[Path(record.path).name for record in attempt.ranks] for attempt in attempts_of(records)]


def test_restarts_that_one_hosts_launcher_does_not_count(tmp_path: Path) -> None:
    """torchrun counts those that its own host's ranks cause; rank 1's host counts none of these two."""
    of_rank_0 = [recorded(tmp_path, 0, number, start_s=100 * number) for number in range(3)]
    of_rank_1 = [recorded(tmp_path, 1, n, start_s=100 * n + 1, attempt=0) for n in range(3)]
    assert found(*of_rank_1, *of_rank_0) == [
        ["00000", "00001"],
        ["00000.1", "00001.1"],
        ["00000.2", "00001.2"],
    ]


def test_jobs_one_after_the_other_without_an_id(tmp_path: Path) -> None:
    records = [
        recorded(tmp_path, rank, n, start_s=100 * n, steps=10 + 5 * (n == rank), attempt=0, job_id=None)
        for rank in range(2)
        for n in range(2)
    ]
    assert found(*records) == [["00000", "00001"], ["00000.1", "00001.1"]]


def test_of_several_recordings_of_one_process_the_longest_counts(tmp_path: Path) -> None:
    for rank in range(2):
        recorded(tmp_path, rank, 0, steps=3, attempt=0, pid=7 + rank)
        recorded(tmp_path, rank, 1, steps=30, start_s=50, attempt=0, pid=7 + rank)
        recorded(tmp_path, rank, 2, steps=10, start_s=100, attempt=1)
    opened = RunDirectory.open(str(tmp_path))
    assert names(opened) == ["00000.1", "00001.1"]
    assert sum("2 other recordings" in str(note) for note in opened.notes) == 1


def test_a_recording_with_a_second_folder_is_one(tmp_path: Path) -> None:
    """Its memory was removed while the job ran, before the rank had read the name of its first folder."""
    for rank in range(2):
        recorded(tmp_path, rank, 0, steps=1, start_s=50, attempt=0, pid=7 + rank)
        recorded(tmp_path, rank, 1, steps=30, start_s=50, attempt=0, pid=7 + rank)
    opened = RunDirectory.open(str(tmp_path))
    assert names(opened) == ["00000.1", "00001.1"]
    assert [(record.repeat, record.attempt) for record in opened.ranks] == [(0, 0), (0, 0)]
    assert not any("other recordings" in str(note) for note in opened.notes)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_recording_without_description_is_of_the_attempt_of_its_number(tmp_path: Path, rank: int) -> None:
    for number in range(2):
        for each in range(2):
            recorded(tmp_path, each, number, start_s=100 * number, steps=30 - 10 * number)
    (tmp_path / "ranks" / f"{rank:05d}" / "rank.json").unlink()
    opened = RunDirectory.open(str(tmp_path))
    assert names(opened) == ["00000", "00001"]
    assert found(*opened.recordings) == [["00000", "00001"], ["00000.1", "00001.1"]]


def test_run_directories_of_two_hosts_are_of_the_same_attempt(tmp_path: Path) -> None:
    """Host b recorded most in attempt 2, and the job in attempt 1."""
    a, b = tmp_path / "a", tmp_path / "b"
    for number in range(2):
        recorded(a, 0, number, start_s=100 * number, steps=90 - 60 * number)
        recorded(b, 1, number, start_s=100 * number, steps=20 + 20 * number)
    both = [str(a), str(b)]
    assert [names(run) for run in RunDirectory.open_all(both)] == [["00000"], ["00001"]]
    assert [names(run) for run in RunDirectory.open_all(both, 2)] == [["00000.1"], ["00001.1"]]


def test_the_attempt_with_the_most_steps_may_have_the_shorter_log(tmp_path: Path) -> None:
    """Other lines than those of steps, as of saved checkpoints, make a log longer, too."""
    recorded(tmp_path, 0, 0, steps=20)
    record = recorded(tmp_path, 0, 1, start_s=100, steps=10)
    with (Path(record.path) / "steps.jsonl").open("a") as log:
        log.write(f'{{"note": "{"x" * 500_000}"}}\n')
    opened = RunDirectory.open(str(tmp_path))
    assert names(opened) == ["00000"] and record.steps == 10
    assert any("attempt 1 of 2 are measured, the one with the most steps" in str(n) for n in opened.notes)


def test_a_host_that_left_no_recording_of_an_attempt(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    recorded(a, 0, 0, steps=90)
    recorded(a, 0, 1, start_s=100)
    recorded(b, 1, 0, start_s=100, attempt=1)
    both = [str(a), str(b)]
    assert [names(run) for run in RunDirectory.open_all(both, 1)] == [["00000"], []]
    assert [names(run) for run in RunDirectory.open_all(both, 2)] == [["00000.1"], ["00001"]]
    with pytest.raises(UnknownAttemptError, match="the run has 2 attempts"):
        RunDirectory.open_all(both, 3)


def test_run_directories_of_other_jobs_have_attempts_of_their_own(tmp_path: Path) -> None:
    recorded(tmp_path / "a", 0, steps=90)
    recorded(tmp_path / "b", 1, job_id="other")
    opened = RunDirectory.open_all([str(tmp_path / "a"), str(tmp_path / "b")])
    assert [names(run) for run in opened] == [["00000"], ["00001"]]


def started_again(tmp_path: Path, *starts: dict[str, Any]) -> list[str]:
    """Run directories of two ranks each, 100 s after each other, with these differences in their manifests."""
    paths = []
    for number, fields in enumerate(starts):
        run = tmp_path / f"run-{number}"
        for rank in range(2):
            recorded(run, rank, start_s=100 * number + 1, attempt=0, job_id="localhost:29500", host="a")
        manifest = {"schema": "ddpdoctor.run/1", "command": ["train"], "host": "a", "exit_code": 1}
        manifest |= {"started_ns": 100 * number * S, "ended_ns": (100 * number + 50) * S} | fields
        (run / "manifest.json").write_text(json.dumps(manifest))
        paths.append(str(run))
    return paths


SLURM = {"exit_code": 0, "job_id": "slurm-7.0"}


@pytest.mark.parametrize(
    ("first", "second", "are_one"),
    [
        ({}, {}, True),
        ({"ended_ns": None, "exit_code": None}, {}, True),
        ({"exit_code": 0}, {}, False),
        (SLURM, {"job_id": "slurm-7.0.r1"}, True),
        (SLURM, {"job_id": "slurm-8.0"}, False),
        ({"command": ["other"]}, {}, False),
        ({"cwd": "/a"}, {"cwd": "/a"}, True),
        ({"cwd": "/a"}, {"cwd": "/b"}, False),
        ({"command": []}, {"command": []}, False),
        ({"ended_ns": 101 * S}, {}, False),
    ],
)
def test_starts_of_one_job_in_directories_of_their_own(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], *, are_one: bool
) -> None:
    """A failed start that the next one follows; one that a launcher left while others follow is finished, or another job."""
    paths = started_again(tmp_path, first, second)
    runs = RunDirectory.open_all(paths[::-1])
    assert [bool(run.ranks) for run in runs] == ([False, True] if are_one else [True, True])
    assert any("attempt 2 of 2" in note.text for run in runs for note in run.notes) == are_one
    if are_one:
        assert [bool(run.ranks) for run in RunDirectory.open_all(paths, attempt=1)] == [True, False]


def test_two_hosts_that_were_started_again(tmp_path: Path) -> None:
    """Each host wrote into a directory of its own, twice, and has a command of its own."""
    paths = started_again(tmp_path, {}, {})
    for path in paths:
        other = Path(path).with_name(f"{Path(path).name}-b")
        other.joinpath("ranks").mkdir(parents=True)
        Path(path, "ranks", "00001").rename(other / "ranks" / "00001")
        manifest = json.loads(Path(path, "manifest.json").read_text())
        (other / "manifest.json").write_text(
            json.dumps({**manifest, "command": ["train", "--node-rank", "1"]})
        )
    folders = sorted(map(str, tmp_path.iterdir()))
    runs = RunDirectory.open_all(folders, attempt=1)
    assert [Path(run.path).name for run in runs if run.ranks] == ["run-0", "run-0-b"]
