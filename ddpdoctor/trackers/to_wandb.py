"""A run of Weights & Biases in its offline mode: written to a folder, which `wandb sync` sends when somebody wants that."""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.trackers.contents import TrackerRun
from ddpdoctor.trackers.packages import missing_package

_PROJECT = "ddpdoctor"
"""Unless the environment names one, as for the package itself."""
_OTHER_RUN = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH")
"""Variables by which a job's own script says which run it is: a diagnosis under that number would change that run once it is sent."""
_MAX_TAG = 64
"""Of a tag."""


def log_to_wandb(run: TrackerRun, folder: Path) -> str:
    """Write an offline run below ``folder``; words for how to send it. Raises DdpDoctorError."""
    place = folder.resolve()
    place.mkdir(parents=True, exist_ok=True)
    # Nothing of this machine goes along, and nothing is reported of the package's own use.
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        os.environ[name] = str(place / ".wandb-files")
    for name in _OTHER_RUN:
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
        # Of a copy that the package makes: what the error names is the file that it was made from.
        raise DdpDoctorError(f"--wandb {folder}: {error.strerror or error}") from error
    return f"wandb sync {shlex.quote(str(where))}"


def _log(run: TrackerRun, wandb: Any, logged: Any) -> None:
    rows: dict[int, dict[str, float]] = {}
    for curve in run.curves:
        for step, value in zip(curve.steps, curve.values, strict=True):
            rows.setdefault(step, {})[f"{curve.of}/{curve.name}"] = value
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
