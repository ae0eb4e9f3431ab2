"""`analyze` on folders that are not run directories."""

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.cli import compare, export
from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import is_run_directory
from tests.trace.trace_files import document, events, write

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
OPTIONS = Options(cache=False, jobs=1)


def test_a_folder_with_one_run_is_that_run(tmp_path):
    shutil.copytree(FIXTURES / "slow-data-one-rank", tmp_path / "runs" / "first")
    found = analyze(str(tmp_path), OPTIONS)
    straight = analyze(str(FIXTURES / "slow-data-one-rank"), OPTIONS)
    assert (
        [finding.rule for finding in found.findings] == [finding.rule for finding in straight.findings] != []
    )
    assert found.steps == straight.steps and found.job.world_size == straight.job.world_size == 2


def test_runs_of_several_jobs_are_refused_with_the_newest(tmp_path):
    for name in ("healthy", "barrier", "slow-data-one-rank"):
        shutil.copytree(FIXTURES / name, tmp_path / name)
        os.utime(tmp_path / name, (1, 2 if name == "barrier" else 1))
    with pytest.raises(UnusableInput, match=r"holds 3 recorded runs.*such as \S+barrier, the newest"):
        analyze(str(tmp_path), OPTIONS)


def test_folders_of_several_hosts_are_joined(tmp_path):
    for rank in ("00000", "00001"):
        run = tmp_path / f"host{rank}"
        shutil.copytree(FIXTURES / "slow-data-one-rank" / "ranks" / rank, run / "ranks" / rank)
        shutil.copy(FIXTURES / "slow-data-one-rank" / "manifest.json", run)
    assert analyze(str(tmp_path), OPTIONS).job.ranks_seen == [0, 1]


@pytest.mark.parametrize(
    ("files", "is_run"),
    [
        ({"manifest.json": '{"name": "a web page"}'}, False),
        ({"manifest.json": '{"schema":"ddpdoctor.run/1","comm'}, True),
        ({"ranks/00000/trace.json": "{}"}, False),
        ({"ranks/00000/steps.jsonl": ""}, True),
        ({"ranks/rank0.json": "{}"}, False),
    ],
)
def test_foreign_folders_with_the_same_names(tmp_path, files, is_run):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert is_run_directory(str(tmp_path)) is is_run


def test_export_and_compare_choose_among_jobs_as_analyze_does(tmp_path):
    """Traces of two jobs in one folder, told apart by their world sizes."""
    for world in (2, 3):
        for rank in range(world):
            document = {"distributedInfo": {"backend": "gloo", "rank": rank, "world_size": world}, "traceEvents": [
                {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1e6 + at, "dur": 5}
                for at in range(0, 1000, 10)
            ]}  # fmt: skip
            (tmp_path / f"world{world}-rank{rank}.json").write_text(json.dumps(document))
    for command, arguments in (
        (export.command, [str(tmp_path), "--parquet", str(tmp_path / "tables")]),
        (compare.command, [str(tmp_path), str(tmp_path)]),
    ):
        with pytest.raises(UnusableInput, match="--job"):
            CliRunner().invoke(command, arguments, catch_exceptions=False)
        done = CliRunner().invoke(command, [*arguments, "--job", "2"], catch_exceptions=False)
        assert done.exit_code == 0, done.output


def test_a_folder_of_traces_is_listed_three_times(tmp_path, monkeypatch):
    for rank in range(2):
        write(tmp_path / f"rank{rank}.json", document(events(20), rank))
    listed, read = [], []
    scandir, opened = os.scandir, os.open
    monkeypatch.setattr(os, "scandir", lambda place: listed.append(str(place)) or scandir(place))
    monkeypatch.setattr(
        os, "open", lambda place, *a, **more: read.append(str(place)) or opened(place, *a, **more)
    )
    analyze([str(tmp_path)], OPTIONS)
    assert listed.count(str(tmp_path)) == 3, "for tables at its top, for run directories, for files"
    assert read.count(str(tmp_path / "rank0.json")) == 3, "to find it, to choose its reader, to read it"
