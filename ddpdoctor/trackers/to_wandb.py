"""Writes an offline run of Weights & Biases to a folder, which the user can upload with `wandb sync`."""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.trackers import missing_package
from ddpdoctor.trackers.contents import TrackerRun

_PROJECT = "ddpdoctor"
"""Project name if $WANDB_PROJECT is not set."""
_RUN_VARIABLES = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH")
"""Environment variables that identify the job's own run. They are unset, because an upload of the diagnosis would change that run."""
_MAX_TAG = 64
"""Maximum number of characters of a tag."""


def log_to_wandb(run: TrackerRun, folder: Path) -> str:
    """Write an offline run below ``folder``. Returns the command to upload it. Raises DdpDoctorError."""
    place = folder.resolve()
    place.mkdir(parents=True, exist_ok=True)
    # Record nothing about this machine, and send no error reports.
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        os.environ[name] = str(place / ".wandb-files")
    for name in _RUN_VARIABLES:
        os.environ.pop(name, None)
    try:
        import wandb
    except ImportError as error:
        raise missing_package("wandb", error) from error
    settings = wandb.Settings(
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
        host="ddpdoctor",
        save_code=False,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    try:
        logged = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=run.name,
            notes=run.verdict,
            tags=[tag[:_MAX_TAG] for tag in (run.tags["ddpdoctor.rule"],) if tag],
            config={**run.params, **run.tags},
            dir=str(place),
            mode="offline",
            job_type="ddpdoctor",
            settings=settings,
        )
        where = Path(logged.dir).parent
        _log(run, wandb, logged)
        logged.finish()
    except wandb.Error as error:
        raise DdpDoctorError(f"--wandb {folder}: {' '.join(str(error).split())}") from error
    except OSError as error:
        # Raised while the package copies a file, so the error's file name would be misleading.
        raise DdpDoctorError(f"--wandb {folder}: {error.strerror or error}") from error
    return f"wandb sync {shlex.quote(str(where))}"


def _log(run: TrackerRun, wandb: Any, logged: Any) -> None:
    rows: dict[int, dict[str, float]] = {}
    for curve in run.curves:
        for step, value in zip(curve.steps, curve.values, strict=True):
            rows.setdefault(step, {})[f"{curve.source}/{curve.name}"] = value
    for step, values in sorted(rows.items()):
        logged.log(values, step=step)
    logged.summary.update(run.metrics)
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-") as folder:
        report = wandb.Artifact(f"{run.name}-report", type="report")
        for file, content in run.files.items():
            place = Path(folder) / file
            place.write_bytes(content)
            report.add_file(str(place))
        logged.log_artifact(report)
