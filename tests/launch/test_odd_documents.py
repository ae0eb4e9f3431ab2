"""A manifest, rank.json or step log that no version of ours wrote: told in a note, and never a crash."""

import json
import shutil
from pathlib import Path

import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.rundir import RunDirectory, read_manifest

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
OPTIONS = Options(cache=False, jobs=1)


def edited(tmp_path, name, **fields):
    run = Path(shutil.copytree(FIXTURES / "barrier", tmp_path / "run"))
    (run / name).write_text(json.dumps({**json.loads((run / name).read_text()), **fields}))
    return str(run)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("manifest.json", "command", 7),
        ("manifest.json", "command", [1]),
        ("manifest.json", "hosts", 5),
        ("manifest.json", "started_ns", "x"),
        ("manifest.json", "ended_ns", 10**30),
        ("manifest.json", "notes", "x"),
        ("manifest.json", "environment", []),
        ("ranks/00001/rank.json", "window", 3),
        ("ranks/00001/rank.json", "window", {"state": []}),
        ("ranks/00001/rank.json", "ddp", 5),
        ("ranks/00001/rank.json", "ddp", [5]),
        ("ranks/00001/rank.json", "ddp", [{"bucket_bytes": ["x"]}]),
        ("ranks/00001/rank.json", "loaders", "x"),
        ("ranks/00001/rank.json", "loaders", [{"id": "x"}]),
        ("ranks/00001/rank.json", "threads", []),
        ("ranks/00001/rank.json", "hook", []),
        ("ranks/00001/rank.json", "notes", 3),
        ("ranks/00001/rank.json", "device", 0),
        ("ranks/00001/rank.json", "environment", 1),
        ("ranks/00001/rank.json", "attempt", "x"),
        ("ranks/00001/rank.json", "world_size", 10**9),
        ("ranks/00001/rank.json", "world_size", "two"),
    ],
)
def test_a_field_of_another_type_is_ignored_and_told(tmp_path, name, field, value):
    run = edited(tmp_path, name, **{field: value})
    notes = [note for note in analyze(run, OPTIONS).notes if "cannot have" in note]
    assert len(notes) == 1 and notes[0].startswith(f"{run}/{name}: ") and f" {field} (" in notes[0]


def test_a_world_size_of_many_ranks_does_not_keep_the_analysis(tmp_path):
    run = edited(tmp_path, "ranks/00000/rank.json", world_size=5_000_000)
    shutil.rmtree(f"{run}/ranks/00001")
    assert len(analyze(run, OPTIONS).job.missing_ranks) == 1000


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("manifest.json", "ddpdoctor.run/1", "ddpdoctor.run/2"),
        ("ranks/00001/rank.json", "ddpdoctor.rank/1", "ddpdoctor.rank/7"),
        ("ranks/00001/steps.jsonl", "ddpdoctor.steps/1", "ddpdoctor.steps/9"),
    ],
)
def test_another_schema_is_told(tmp_path, name, known, found):
    run = Path(shutil.copytree(FIXTURES / "barrier", tmp_path / "run"))
    (run / name).write_text((run / name).read_text().replace(known, found))
    told = [note for note in map(str, RunDirectory.open(str(run)).notes) if "schema" in note]
    assert told == [
        f"{run}/{name} has the schema {found}, this version reads {known}: what is said of it may be wrong."
    ]


@pytest.mark.parametrize("run", sorted(FIXTURES.glob("*/manifest.json")), ids=lambda path: path.parent.name)
def test_what_we_recorded_has_the_types_that_we_expect(run):
    opened = RunDirectory.open(str(run.parent))
    assert opened.notes == [] and len(opened.ranks) == 2


def test_watch_reads_a_manifest_of_odd_types(tmp_path):
    assert "started_ns" not in read_manifest(edited(tmp_path, "manifest.json", started_ns="x"), [])
