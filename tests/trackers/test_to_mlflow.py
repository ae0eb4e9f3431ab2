"""MLflow's own client finds the run in the database that was written, without any network."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.analysis import analyze
from ddpdoctor.trackers import tracked

from .exporting import RUN, export, mentions, names_left

pytest.importorskip("mlflow")
pytestmark = pytest.mark.slow


def test_the_run_is_there_with_metrics_verdict_and_report(tmp_path):
    from mlflow import MlflowClient

    diagnosis = analyze([str(RUN)])
    expected = tracked(diagnosis)
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
    curve = next(each for each in expected.curves if each.name == "step_ms" and each.of == "rank_00001")
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


def test_a_second_export_is_a_second_run(tmp_path):
    from mlflow import MlflowClient

    for _ in range(2):
        export(tmp_path, "--mlflow", f"sqlite:///{tmp_path}/own.db")
    client = MlflowClient(f"sqlite:///{tmp_path}/own.db")
    assert len(client.search_runs([client.get_experiment_by_name("ddpdoctor").experiment_id])) == 2
