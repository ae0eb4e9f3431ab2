"""Writes a run to MLflow: parameters, metrics by step, the verdict as description, report and diagnosis as artifacts."""

from __future__ import annotations

import contextlib
import os
import shlex
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.trackers import missing_package

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from ddpdoctor.trackers.contents import TrackerRun

_EXPERIMENT = "ddpdoctor"
"""Experiment name if $MLFLOW_EXPERIMENT_NAME is not set."""
_MAX_METRICS, _MAX_PARAMS = 1000, 100
"""Limits of a request: https://mlflow.org/docs/latest/rest-api.html#log-batch"""
_TABLES = {"alembic_version", "experiments", "runs"}
"""Tables that every MLflow database has."""
_MAX_TAG = 5000
"""Maximum number of characters of a tag."""
_NOTE = "mlflow.note.content"
"""Tag whose Markdown MLflow shows as the run's description."""
_Item = TypeVar("_Item")


def log_to_mlflow(run: TrackerRun, place: str) -> str:
    """Log to ``place``: a URI, or a folder for a database and artifacts. Returns the command to view it. Raises DdpDoctorError."""
    # By default, MLflow sends usage statistics.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise missing_package("mlflow", error) from error
    uri, artifact_uri = place, None
    if "://" not in place:
        folder = Path(place).resolve()
        uri, artifact_uri = _database_uri(folder / "mlflow.db"), (folder / "artifacts").as_uri()
        check_mlflow(folder)
        folder.mkdir(parents=True, exist_ok=True)
    failures: tuple[type[Exception], ...] = (MlflowException, ImportError, *_database_errors())
    try:
        _log(run, MlflowClient(tracking_uri=uri), artifact_uri)
    except failures as error:
        raise DdpDoctorError(f"--mlflow {place}: {' '.join(str(error).split())}") from error
    return f"mlflow ui --backend-store-uri {shlex.quote(uri)}"


def _database_uri(file: Path) -> str:
    """The database URI of ``file``. Raises DdpDoctorError if the path contains characters that are special in URIs, such as ``?``."""
    uri = f"sqlite:///{file}"
    try:
        from sqlalchemy.engine import make_url
    except ImportError:
        return uri
    if make_url(uri).database != str(file):
        raise DdpDoctorError(
            f"--mlflow {file.parent}: MLflow has no way to name a database there: name a folder without ? and %."
        )
    return uri


def check_mlflow(folder: Path) -> None:
    """Raise DdpDoctorError if ``folder`` has an mlflow.db that is not MLflow's, because MLflow would add its tables to it."""
    file = folder / "mlflow.db"
    if not file.exists() or (file.is_file() and not file.stat().st_size):
        return
    try:
        with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as database:
            known = {
                row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
    except sqlite3.OperationalError:  # locked, or on a full disk: MLflow reports it
        return
    except (sqlite3.Error, ValueError):
        known = set()
    if not known >= _TABLES:
        raise DdpDoctorError(
            f"--mlflow {file.parent}: {file.name} there is not MLflow's: name another folder."
        )


def _database_errors() -> tuple[type[Exception], ...]:
    """Errors of a damaged, locked or read-only database, or of a full disk, which MLflow does not wrap."""
    try:
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:
        return ()
    return (SQLAlchemyError,)


def _log(run: TrackerRun, client: MlflowClient, artifact_uri: str | None) -> None:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
    experiment = client.get_experiment_by_name(name)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(name, artifact_uri)
    at_ms = None if run.started_s is None else int(run.started_s * 1e3)
    logged_id = client.create_run(experiment_id, start_time=at_ms, run_name=run.name).info.run_id
    try:
        _log_data(run, client, logged_id, at_ms or 0)
    except BaseException:
        # Otherwise MLflow shows the run as running.
        with contextlib.suppress(Exception):
            client.set_terminated(logged_id, "FAILED")
        raise
    client.set_terminated(logged_id)


def _log_data(run: TrackerRun, client: MlflowClient, logged_id: str, at_ms: int) -> None:
    from mlflow.entities import Metric, Param, RunTag

    metrics = [Metric(name, value, at_ms, 0) for name, value in run.metrics.items()]
    metrics += [
        Metric(f"{curve.source}/{curve.name}", value, at_ms, step)
        for curve in run.curves
        for step, value in zip(curve.steps, curve.values, strict=True)
    ]
    tags = [RunTag(name, text[:_MAX_TAG]) for name, text in {**run.tags, _NOTE: run.verdict}.items() if text]
    client.log_batch(logged_id, tags=tags)
    for params in _batches([Param(name, text) for name, text in run.params.items()], _MAX_PARAMS):
        client.log_batch(logged_id, params=params)
    for part in _batches(metrics, _MAX_METRICS):
        client.log_batch(logged_id, metrics=part)
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-") as folder:
        for file, content in run.files.items():
            (Path(folder) / file).write_bytes(content)
        client.log_artifacts(logged_id, folder)


def _batches(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
