"""What trackers get of a diagnosis: of any job so much, nothing that was not measured, no name that is to be hidden."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import sys

import msgspec
import pytest
from click.testing import CliRunner

from ddpdoctor.cli.export import command
from ddpdoctor.diagnose.diagnosis import Series
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.report.json_output import write_json
from ddpdoctor.report.redaction import redact
from ddpdoctor.trackers.contents import MAXIMUM, MEDIAN, tracker_run
from ddpdoctor.trackers.to_mlflow import check_mlflow
from tests.report import samples


def curve(run, name, of):
    (found,) = [each for each in run.curves if (each.name, each.source) == (name, of)]
    return found


def test_each_rank_has_its_numbers_by_step():
    diagnosis = samples.unhealthy()
    run = tracker_run(diagnosis)
    series = diagnosis.series
    for r, rank in enumerate(series.ranks):
        times = curve(run, "step_ms", f"rank_{rank:05d}")
        known = [(s, ms) for s, ms in zip(series.steps, series.step_ms[r], strict=False) if ms is not None]
        assert list(zip(times.steps, times.values, strict=True)) == known
    assert curve(run, "late_ms", MAXIMUM).values
    slowest = {rank.rank: rank for rank in diagnosis.ranks if rank.breakdown_ms}
    for rank, summary in slowest.items():
        for part, ms in summary.breakdown_ms.items():
            assert curve(run, f"breakdown_ms/{part}", f"rank_{rank:05d}").values == [ms]
    assert run.metrics["step/median_ms"] == diagnosis.steps.median_ms
    assert run.metrics["healthy"] == 0
    assert (run.metrics["run/wall_s"], run.metrics["run/goodput"], run.metrics["run/pauses_s"]) == (
        40.0,
        0.15,
        8.0,
    )
    dearest = diagnosis.findings[0]
    assert run.metrics[f"cost_ms/{dearest.rule}"] == dearest.costs_ms_per_step
    assert run.tags["ddpdoctor.verdict"] == diagnosis.verdict.headline
    assert len(run.findings) == len(diagnosis.findings)
    assert run.files.keys() == {"report.html", "diagnosis.json"}
    assert not run.note


@pytest.mark.extended
def test_many_ranks_and_long_runs_are_bounded():
    diagnosis = samples.large(ranks=512, points=400)
    series = diagnosis.series
    long = Series(
        steps=[*range(3000)],
        ranks=series.ranks,
        step_ms=[(row * 10)[:3000] for row in series.step_ms],
        late_ms=[(row * 10)[:3000] for row in series.late_ms],
    )
    run = tracker_run(msgspec.structs.replace(diagnosis, series=long))
    ranks = {each.source for each in run.curves}
    assert {MEDIAN, MAXIMUM} < ranks
    assert len(ranks) == 16 + 2
    assert max(len(each.steps) for each in run.curves) <= 400
    assert "16 ranks" in run.note
    named = {rank for finding in diagnosis.findings for rank in (finding.ranks or [])[:8]}
    assert {f"rank_{rank:05d}" for rank in sorted(named)[:8]} <= ranks or not named
    whole = [row[0] for row in long.step_ms if row[0] is not None]
    assert curve(run, "step_ms", MAXIMUM).values[0] == pytest.approx(max(whole))


def test_what_was_not_measured_is_not_there():
    assert tracker_run(samples.minimal()).curves == []
    gaps = Series(
        steps=[0, 1, 2], ranks=[0, 1], step_ms=[[1.0, None, 3.0], [None, None, None]], late_ms=[[], []]
    )
    run = tracker_run(msgspec.structs.replace(samples.minimal(), series=gaps))
    assert curve(run, "step_ms", "rank_00000").steps == [0, 2]
    assert curve(run, "step_ms", "rank_00001").steps == []
    assert curve(run, "step_ms", MEDIAN).values == [1.0, 3.0]
    assert not [each for each in run.curves if each.name == "late_ms"]
    assert "step/median_ms" not in run.metrics and "run/goodput" not in run.metrics
    assert "run/restarts" not in run.metrics


def test_anybodys_names_are_letters_for_a_tracker():
    run = tracker_run(samples.hostile())
    assert re.fullmatch(r"[A-Za-z0-9._-]+", run.name)
    unhealthy = samples.unhealthy()
    found = [
        msgspec.structs.replace(unhealthy.findings[0], rule=rule)
        for rule in ("../../a", "/", "x\u202e\x1b[31m", "y" * 5000)
    ]
    source = [f"/tmp/{'r' * 5000}.json"]
    odd = tracker_run(
        msgspec.structs.replace(unhealthy, findings=found, source=source, breakdown={"<b>//..": 0.5})
    )
    assert len(odd.name) == 100
    for each in (run, odd):
        names = [
            *each.params,
            *each.metrics,
            *each.findings,
            *(f"{curve.source}/{curve.name}" for curve in each.curves),
        ]
        assert all(re.fullmatch(r"[A-Za-z0-9_./ -]{1,200}", name) for name in names)
        assert not any(part in ("", ".", "..") for name in names for part in name.split("/"))


def test_redaction_reaches_all_of_it():
    diagnosis = samples.unhealthy()
    host = diagnosis.job.hosts[0]
    assert host in repr(tracker_run(diagnosis))
    assert host not in repr(tracker_run(redact(diagnosis)))


@pytest.mark.parametrize("option", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_named_with_its_extra(option, tmp_path, monkeypatch):
    for name in [option, *[name for name in sys.modules if name.startswith(f"{option}.")]]:
        monkeypatch.setitem(sys.modules, name, None)
    write_json(samples.unhealthy(), tmp_path / "diagnosis.json")
    with pytest.raises(DdpDoctorError, match=rf"pip install '\.\[{option}\]'"):
        CliRunner().invoke(
            command,
            [str(tmp_path / "diagnosis.json"), f"--{option}", str(tmp_path / "out")],
            catch_exceptions=False,
        )


def test_trackers_write_into_no_recording_and_hide_no_table(tmp_path):
    (tmp_path / "run" / "hosts").mkdir(parents=True)
    (tmp_path / "run" / "manifest.json").write_text('{"schema": "ddpdoctor.run/1"}')
    invoke = CliRunner().invoke
    for place in ("run", "run/hosts"):
        arguments = [str(tmp_path / "run"), "--tensorboard", str(tmp_path / place)]
        with pytest.raises(DdpDoctorError, match="recorded run"):
            invoke(command, arguments, catch_exceptions=False)
    done = invoke(command, ["x", "--csv", str(tmp_path / "t"), "--tensorboard", "tb", "--redact"])
    assert done.exit_code == 2
    assert "--redact is for figures and trackers" in done.output
    done = invoke(command, ["x", "--tensorboard", "tb", "--steps", "1:2"])
    assert done.exit_code == 2


@pytest.mark.parametrize(
    ("statements", "ours"),
    [
        ((), True),
        (("CREATE TABLE notes (text)",), False),
        (("CREATE TABLE experiments (text)",), False),
        (
            tuple(
                f"CREATE TABLE {name} (text)" for name in ("alembic_version", "experiments", "runs", "tags")
            ),
            True,
        ),
    ],
)
def test_only_a_database_of_mlflow_is_opened_by_it(tmp_path, statements, ours):
    """MLflow makes its tables in whatever database it is given."""
    file = tmp_path / "mlflow.db"
    with contextlib.closing(sqlite3.connect(file)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()
    with (
        contextlib.nullcontext()
        if ours
        else pytest.raises(DdpDoctorError, match="not MLflow's: name another folder")
    ):
        check_mlflow(tmp_path)
    file.write_text("notes of mine")
    with pytest.raises(DdpDoctorError, match="not MLflow's"):
        check_mlflow(tmp_path)


def test_trackers_write_into_no_recording_by_a_link(tmp_path):
    (tmp_path / "run" / "ranks" / "00000").mkdir(parents=True)
    (tmp_path / "run" / "manifest.json").write_text('{"schema": "ddpdoctor.run/1"}')
    (tmp_path / "link").symlink_to("run")
    for option in ("--tensorboard", "--mlflow", "--wandb"):
        for place in ("link", "link/ranks"):
            with pytest.raises(DdpDoctorError, match="recorded run: name another folder"):
                CliRunner().invoke(command, ["x.json", option, str(tmp_path / place)], catch_exceptions=False)
