"""A damaged file of one rank costs what it held, nothing of another rank, and is named."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.rundir import RunDirectory
from ddpdoctor.rundir.files import parsed

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "slow-data-one-rank"
OPTIONS = Options(cache=False, jobs=1)


@pytest.fixture
def run(tmp_path) -> Path:
    return Path(shutil.copytree(FIXTURE, tmp_path / "run", ignore=shutil.ignore_patterns("trace.json.gz")))


@functools.cache
def whole() -> Diagnosis:
    return analyze(str(FIXTURE), OPTIONS)


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


def empty(path: Path) -> None:
    path.write_text("")


@pytest.mark.parametrize(
    ("damage", "words", "rank"),
    [(remove, "is missing", 0), (truncate, "cannot be read", 1), (unreadable, "cannot be read", 1)],
)
def test_a_rank_without_its_description(tmp_path, damage, words, rank) -> None:
    run = Path(shutil.copytree(FIXTURE, tmp_path / "run"))
    damage(run / "ranks" / f"0000{rank}" / "rank.json")
    found = analyze(str(run), OPTIONS)
    assert found.job.ranks_seen == [0, 1] and found.steps.count == whole().steps.count
    assert [finding.rule for finding in found.findings] == [finding.rule for finding in whole().findings]
    notes = [note for note in found.notes if note.startswith(f"Rank {rank}: {run}") and words in note]
    assert len(notes) == 1 and "rank.json" in notes[0], found.notes
    assert not any("left out" in note for note in found.notes)


@pytest.mark.parametrize(
    ("damage", "words"),
    [(remove, "is missing"), (empty, "is empty"), (unreadable, "cannot be read"), (truncate, "no step")],
)
def test_a_rank_without_its_steps(run, damage, words) -> None:
    log = run / "ranks" / "00001" / "steps.jsonl"
    damage(log)
    found = analyze(str(run), OPTIONS)
    (note,) = [note for note in found.notes if note.startswith("Rank 1: ") and "steps.jsonl" in note]
    assert words in note and str(log) in note and "1 of 2 ranks could be looked at" in note
    assert found.job.world_size == 2


def test_a_file_in_place_of_a_ranks_folder(run) -> None:
    folder = run / "ranks" / "00001"
    shutil.rmtree(folder)
    folder.write_text("")
    found = analyze(str(run), OPTIONS)
    assert found.steps.count > 0 and found.job.missing_ranks == [1]
    assert f"Rank 1: {folder} is not a folder: what this rank recorded is lost." in found.notes
    assert not any("left out" in note for note in found.notes)


def test_restarts_of_which_one_description_is_lost(run) -> None:
    """Attempt 1 recorded most; what its rank 1 wrote is told from attempt 0's by the number of the folder."""
    ranks = run / "ranks"
    for rank in ("00000", "00001"):
        shutil.copytree(ranks / rank, ranks / f"{rank}.1")
        info = json.loads((ranks / f"{rank}.1" / "rank.json").read_text())
        (ranks / f"{rank}.1" / "rank.json").write_text(json.dumps({**info, "attempt": 1}))
        truncate(ranks / rank / "steps.jsonl")
    (ranks / "00001.1" / "rank.json").unlink()
    opened = RunDirectory.open(str(run))
    assert [Path(record.path).name for record in opened.ranks] == ["00000.1", "00001.1"]
    assert sum("2 other recordings" in str(note) for note in opened.notes) == 1


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (1, "Rank 1 was killed while its profiler window was open: what the window"),
        (None, "when this was read"),
    ],
)
def test_a_rank_that_was_killed_in_its_window(run, ended, words) -> None:
    path = run / "ranks" / "00001" / "rank.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps({**info, "window": {**info["window"], "state": "open"}}))
    (path.parent / "trace.json.gz").unlink(missing_ok=True)
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "ended_ns": ended}))
    notes = [note for note in analyze(str(run), OPTIONS).notes if "window was open" in note]
    assert len(notes) == 1 and words in notes[0]


def test_a_run_without_any_description(run) -> None:
    for path in run.glob("ranks/*/rank.json"):
        path.unlink()
    assert analyze(str(run), OPTIONS).job.ranks_seen == [0, 1]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b'{"rank": 0, "wor', "it is cut off"),
        (b'{"rank": 0,', "it is cut off"),
        (b'{"rank": 0', "it is cut off"),
        (b"[1, 2", "it is cut off"),
        (b'{"rank" 0}', "it is no JSON: line 1, character 9"),
        (b'{\n"rank": nothing}', "it is no JSON: line 2, character 9"),
        (b"{} {}", "it is no JSON: line 1, character 4"),
        (b"9" * 5000, "a number in it has too many digits"),
        (b'{"a": "\xff"}', "it is no JSON: it holds bytes that are no text"),
    ],
)
def test_what_is_no_json_is_told_in_plain_words(data, says):
    with pytest.raises(ValueError, match=f"^{says}$"):
        parsed(data)
