"""MLflow's own client finds the run in the database that was written, without any network."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ddpdoctor.analysis import analyze
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.trackers.contents import tracker_run
from tests.report import samples

from .exporting import RUN, export, mentions, names_left

pytest.importorskip("mlflow")
pytestmark = pytest.mark.slow


def test_the_run_is_there_with_metrics_verdict_and_report(tmp_path):
    from mlflow import MlflowClient

    diagnosis = analyze([str(RUN)])
    expected = tracker_run(diagnosis)
    done = export(tmp_path, "--mlflow", "tracking")
    assert f"sqlite:///{tmp_path}/tracking/mlflow.db" in done.stdout
    assert not (tmp_path / "mlruns").exists()
    client = MlflowClient(f"sqlite:///{tmp_path}/tracking/mlflow.db")
    experiment = client.get_experiment_by_name("ddpdoctor")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == RUN.name
    assert run.data.params == expected.params
    assert run.data.tags["ddpdoctor.verdict"] == diagnosis.verdict.headline
    assert diagnosis.verdict.headline[:20] in run.data.tags["mlflow.note.content"]
    for name, value in expected.metrics.items():
        assert run.data.metrics[name] == pytest.approx(value)
    curve = next(each for each in expected.curves if each.name == "step_ms" and each.source == "rank_00001")
    history = client.get_metric_history(run.info.run_id, "rank_00001/step_ms")
    assert [(each.step, each.value) for each in sorted(history, key=lambda each: each.step)] == [
        *zip(curve.steps, curve.values, strict=True)
    ]
    assert {each.path for each in client.list_artifacts(run.info.run_id)} == {"report.html", "diagnosis.json"}
    place = client.download_artifacts(run.info.run_id, "report.html")
    assert "<svg" in Path(place).read_text()


def test_redacted_no_name_goes_along(tmp_path):
    assert not names_left(tmp_path, "--mlflow", "out", "--redact", MLFLOW_EXPERIMENT_NAME="ours")
    assert mentions(tmp_path / "out", "ours")


@pytest.mark.parametrize("name", ["a?b", "a%20b"])
def test_a_folder_whose_name_means_another_in_a_uri_is_refused(tmp_path, name):
    from ddpdoctor.trackers.to_mlflow import log_to_mlflow

    with pytest.raises(DdpDoctorError, match=r"without \? and %"):
        log_to_mlflow(tracker_run(samples.unhealthy()), str(tmp_path / name))
    assert not list(tmp_path.iterdir())


def test_what_is_no_database_is_no_defect_of_ours(tmp_path):
    from ddpdoctor.trackers.to_mlflow import log_to_mlflow

    (tmp_path / "mlflow.db").write_text("notes of mine")
    with pytest.raises(DdpDoctorError, match=r"mlflow\.db there is not MLflow's"):
        log_to_mlflow(tracker_run(samples.unhealthy()), str(tmp_path))
    assert (tmp_path / "mlflow.db").read_text() == "notes of mine"


def test_an_export_that_ends_half_way_is_a_failed_run(tmp_path):
    """No server takes a time before 1970."""
    from mlflow import MlflowClient

    from ddpdoctor.trackers.to_mlflow import log_to_mlflow

    run = dataclasses.replace(tracker_run(samples.unhealthy()), started_s=-1e9)
    with pytest.raises(DdpDoctorError, match="imestamp"):
        log_to_mlflow(run, str(tmp_path))
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("ddpdoctor")
    assert [each.info.status for each in client.search_runs([experiment.experiment_id])] == ["FAILED"]


def test_a_second_export_is_a_second_run(tmp_path):
    from mlflow import MlflowClient

    for _ in range(2):
        export(tmp_path, "--mlflow", f"sqlite:///{tmp_path}/own.db")
    client = MlflowClient(f"sqlite:///{tmp_path}/own.db")
    assert len(client.search_runs([client.get_experiment_by_name("ddpdoctor").experiment_id])) == 2
