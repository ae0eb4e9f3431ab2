"""The attempts of a run are analysed one by one, and its files are read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.analysis.inputs import Options, load
from ddpdoctor.analysis.job import attempt_records
from ddpdoctor.measure.steplog import read_rank_log
from ddpdoctor.rundir.reader import RunDirectory
from ddpdoctor.stall import evidence
from tests.rundir.test_attempts import recorded


def test_what_ranks_left_of_their_ends_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        for rank in range(2):
            recorded(tmp_path, rank, number, start_s=100 * number)
    run = RunDirectory.open(str(tmp_path))
    read, original = [], evidence.read_stops
    monkeypatch.setattr(evidence, "read_stops", lambda *given: read.append(given) or original(*given))
    records, _ = attempt_records([run], [read_rank_log(record) for record in run.ranks])
    assert len(records) == 5 and [each.steps for each in records] == [10] * 5
    assert len(read) == 1


@pytest.mark.parametrize(("restarts", "names"), [(1, ["00000.1"]), (0, ["00000"])])
def test_a_restart_that_took_no_step_ends_the_job(tmp_path: Path, restarts: int, names: list[str]) -> None:
    """It may have had nothing left to do, or have failed before its first step; another command's job without steps is none."""
    recorded(tmp_path, 0)
    recorded(tmp_path, 0, 1, start_s=100, steps=0, attempt=restarts)
    run = RunDirectory.open(str(tmp_path))
    records = evidence.last_attempt([run], [read_rank_log(record) for record in run.ranks])
    assert [Path(record.path).name for record in records] == names


@pytest.mark.parametrize(
    ("counts", "unrecorded", "said"),
    [
        ((0, 1), [0, 0], []),
        (
            (0, 3),
            [0, 2],
            ["Between recorded attempts 1 and 2, the launcher started 2 more attempts, which are not"],
        ),
        (
            (1, 2),
            [1, 0],
            [
                "Before recorded attempt 1, the launcher started one more attempt, which is not in this recording"
            ],
        ),
        (
            (1,),
            [],
            [
                "Before recorded attempt 1, the launcher started one more attempt, which is not in this recording; most likely its ranks"
            ],
        ),
    ],
)
def test_attempts_that_ended_before_their_process_group(
    tmp_path: Path, counts: tuple[int, ...], unrecorded: list[int], said: list[str]
) -> None:
    for number, count in enumerate(counts):
        for rank in range(2):
            recorded(tmp_path, rank, number, start_s=100 * number, attempt=count)
    run = RunDirectory.open(str(tmp_path))
    records, notes = attempt_records([run], [read_rank_log(record) for record in run.ranks])
    assert [each.unrecorded for each in records] == unrecorded
    assert len(notes) == len(said)
    assert all(words in note.text for words, note in zip(said, notes, strict=True))
    assert all("most likely" in note.text for note in notes)


def test_another_run_of_the_same_ranks_is_not_read(tmp_path: Path) -> None:
    """Neither its further rank, nor its host's samples, nor how it ended."""
    for name, ranks in (("a", 2), ("b", 3)):
        for rank in range(ranks):
            recorded(tmp_path / name, rank, job_id=name, world_size=ranks, start_s=100 * ranks)
    inputs = load([str(tmp_path / "a"), str(tmp_path / "b")], Options())
    assert [Path(run.path).name for run in inputs.runs] == ["a"]
    assert [Path(log.record.path).parent.parent.name for log in inputs.logs] == ["a", "a"]
    assert [note.text for note in inputs.notes if "b is skipped: ranks 0 and 1 were already" in note.text]
    assert attempt_records(inputs.runs, inputs.logs)[0] == []


def test_a_folder_with_some_ranks_again_and_others_of_the_job(tmp_path: Path) -> None:
    for rank in range(2):
        recorded(tmp_path / "all", rank, host="h")
    recorded(tmp_path / "one", 0, host="h")
    inputs = load([str(tmp_path / "one"), str(tmp_path / "all")], Options())
    assert [log.record.path for log in inputs.logs] == [
        str(tmp_path / "one/ranks/00000"),
        str(tmp_path / "all/ranks/00001"),
    ]


def test_a_start_that_recorded_no_rank_is_named(tmp_path: Path) -> None:
    recorded(tmp_path / "a", 0)
    (tmp_path / "b" / "ranks").mkdir(parents=True)
    (tmp_path / "b" / "manifest.json").write_text('{"schema": "ddpdoctor.run/1", "exit_code": 3}')
    inputs = load([str(tmp_path / "a"), str(tmp_path / "b")], Options())
    (note,) = [note.text for note in inputs.notes if "has no recorded rank" in note.text]
    assert note.startswith(str(tmp_path / "b")) and note.endswith("Exit code of its command: 3.")
