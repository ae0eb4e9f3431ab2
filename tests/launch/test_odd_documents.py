"""A manifest, rank.json or step log that no version of ours wrote: told in a note, and never a crash."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.rundir.reader import RunDirectory, read_manifest

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
OPTIONS = Options(cache=False, jobs=1)


def edited(tmp_path, name, **fields):
    run = Path(shutil.copytree(FIXTURES / "barrier", tmp_path / "run", dirs_exist_ok=True))
    (run / name).write_text(json.dumps({**json.loads((run / name).read_text()), **fields}))
    return str(run)


ODD: dict[str, dict[str, list[Any]]] = {
    "manifest.json": {
        "command": [7, [1]],
        "hosts": [5],
        "started_ns": ["x", 1e300, -(2**62)],
        "ended_ns": [10**30],
        "notes": ["x", [{"a": 1}]],
        "environment": [[], {"A": ["x"]}],
    },
    "ranks/00001/rank.json": {
        "window": [3, {"state": []}],
        "ddp": [5, [5], [{"bucket_bytes": ["x"]}], [{"parameters_bytes": float("inf")}]],
        "loaders": ["x", [{"id": "x"}], [{"id": None, "num_workers": 2}]],
        "optimizers": [[{"type": "SGD", "lr": float("nan"), "steps": 10**40}]],
        "threads": [[]],
        "hook": [[], {"errors": [5]}],
        "device": [0],
        "environment": [1],
        "attempt": ["x", float("inf")],
        "world_size": [10**9, "two", float("nan")],
        "pid": [2**70],
        "job_id": [{"a": 1}],
    },
}
EACH = [
    (name, field, value)
    for name, fields in ODD.items()
    for field, values in fields.items()
    for value in values
]


def test_a_field_of_another_type_is_ignored_and_told(tmp_path):
    for name, field, value in EACH:
        run = edited(tmp_path, name, **{field: value})
        found = [note for note in map(str, RunDirectory.open(run).notes) if "cannot have" in note]
        assert len(found) == 1 and found[0].startswith(f"{run}/{name}: "), (field, value, found)
        # Of a number that cannot be, the innermost name is told.
        assert re.search(rf" {field} \(|\((inf|nan)\)", found[0]), (field, value, found)


@pytest.mark.parametrize(
    "chosen", range(max(len(values) for fields in ODD.values() for values in fields.values()))
)
def test_the_analysis_does_without_them(tmp_path, chosen):
    for name, fields in ODD.items():
        values = {field: values[min(chosen, len(values) - 1)] for field, values in fields.items()}
        run = tmp_path / "run"
        if name == "manifest.json":
            edited(tmp_path, name, **values)
        else:
            document = json.loads((run / name).read_text())
            (run / name).write_text(json.dumps({**document, **values}))
    found = analyze(str(run), OPTIONS)
    assert found.steps.count > 0
    noted = {note.partition(": ")[0] for note in found.notes if "cannot have" in note}
    assert noted == {str(run / name) for name in ODD}


def test_a_world_size_of_many_ranks_does_not_keep_the_analysis(tmp_path):
    run = edited(tmp_path, "ranks/00000/rank.json", world_size=5_000_000)
    shutil.rmtree(f"{run}/ranks/00001")
    assert len(analyze(run, OPTIONS).job.missing_ranks) == 1000


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("manifest.json", "ddpdoctor.run/1", "ddpdoctor.run/2"),
        ("ranks/00001/rank.json", "ddpdoctor.rank/2", "ddpdoctor.rank/7"),
        ("ranks/00001/steps.jsonl", "ddpdoctor.steps/2", "ddpdoctor.steps/9"),
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
    assert opened.notes == [] and len(opened.ranks) == len(list(run.parent.glob("ranks/*")))


def test_watch_reads_a_manifest_of_odd_types(tmp_path):
    assert "started_ns" not in read_manifest(edited(tmp_path, "manifest.json", started_ns="x"), [])
