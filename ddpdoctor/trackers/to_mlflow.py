"""A run in MLflow: parameters, metrics by step, the verdict as its note, report and diagnosis as artefacts."""

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
from ddpdoctor.trackers.packages import missing_package

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from ddpdoctor.trackers.contents import TrackerRun

_EXPERIMENT = "ddpdoctor"
"""Unless the environment names one, as for MLflow's own commands."""
_MAX_METRICS, _MAX_PARAMS = 1000, 100
"""Of one request: https://mlflow.org/docs/latest/rest-api.html#log-batch"""
_TABLES = {"alembic_version", "experiments", "runs"}
"""That every database of MLflow has."""
_MAX_TAG = 5000
"""Of a tag."""
_NOTE = "mlflow.note.content"
"""The tag whose Markdown MLflow shows as the run's description."""
_Item = TypeVar("_Item")


def log_to_mlflow(run: TrackerRun, place: str) -> str:
    """Log to the folder ``place``, as a database and artefacts in there, or to what it names as a URI; words for how to look at it.

    Raises DdpDoctorError.
    """
    # Of the package's own use, which it reports unless told not to.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise missing_package("mlflow", error) from error
    uri, artefacts = place, None
    if "://" not in place:
        folder = Path(place).resolve()
        uri, artefacts = _database(folder / "mlflow.db"), (folder / "artifacts").as_uri()
        check_mlflow(folder)
        folder.mkdir(parents=True, exist_ok=True)
    failures: tuple[type[Exception], ...] = (MlflowException, ImportError, *_database_errors())
    try:
        _log(run, MlflowClient(tracking_uri=uri), artefacts)
    except failures as error:
        raise DdpDoctorError(f"--mlflow {place}: {' '.join(str(error).split())}") from error
    return f"mlflow ui --backend-store-uri {shlex.quote(uri)}"


def _database(file: Path) -> str:
    """The URI of ``file``. Raises DdpDoctorError where it would be read as another file's: ``?`` ends a path, ``%20`` is a space."""
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
    """Raises DdpDoctorError where ``folder`` has an mlflow.db that is not MLflow's: opening it would put MLflow's tables there."""
    file = folder / "mlflow.db"
    if not file.exists() or (file.is_file() and not file.stat().st_size):
        return
    try:
        with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as database:
            known = {
                row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
    except sqlite3.OperationalError:  # locked, or on a full disk: MLflow says so itself
        return
    except (sqlite3.Error, ValueError):
        known = set()
    if not known >= _TABLES:
        raise DdpDoctorError(
            f"--mlflow {file.parent}: {file.name} there is not MLflow's: name another folder."
        )


def _database_errors() -> tuple[type[Exception], ...]:
    """What MLflow lets through of a database that is damaged, locked, read-only or has no space left."""
    try:
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:
        return ()
    return (SQLAlchemyError,)


def _log(run: TrackerRun, client: MlflowClient, artefacts: str | None) -> None:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
    experiment = client.get_experiment_by_name(name)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(name, artefacts)
    at_ms = None if run.started_s is None else int(run.started_s * 1e3)
    made = client.create_run(experiment_id, start_time=at_ms, run_name=run.name).info.run_id
    try:
        _fill(run, client, made, at_ms or 0)
    except BaseException:
        # It would look as if it were still going on.
        with contextlib.suppress(Exception):
            client.set_terminated(made, "FAILED")
        raise
    client.set_terminated(made)


def _fill(run: TrackerRun, client: MlflowClient, made: str, at_ms: int) -> None:
    from mlflow.entities import Metric, Param, RunTag

    metrics = [Metric(name, value, at_ms, 0) for name, value in run.metrics.items()]
    metrics += [
        Metric(f"{curve.of}/{curve.name}", value, at_ms, step)
        for curve in run.curves
        for step, value in zip(curve.steps, curve.values, strict=True)
    ]
    tags = [RunTag(name, text[:_MAX_TAG]) for name, text in {**run.tags, _NOTE: run.verdict}.items() if text]
    client.log_batch(made, tags=tags)
    for params in _parts([Param(name, text) for name, text in run.params.items()], _MAX_PARAMS):
        client.log_batch(made, params=params)
    for part in _parts(metrics, _MAX_METRICS):
        client.log_batch(made, metrics=part)
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-") as folder:
        for file, content in run.files.items():
            (Path(folder) / file).write_bytes(content)
        client.log_artifacts(made, folder)


def _parts(items: Sequence[_Item], most: int) -> Iterator[Sequence[_Item]]:
    for first in range(0, len(items), most):
        yield items[first : first + most]
