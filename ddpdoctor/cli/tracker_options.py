"""The options of ``export`` for experiment trackers."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddpdoctor.cli.say import say
from ddpdoctor.errors import DdpDoctorError

if TYPE_CHECKING:
    from ddpdoctor.diagnose.diagnosis import Diagnosis

Command = Callable[..., Any]


@dataclass(frozen=True)
class Trackers:
    """The requested trackers; None if not requested."""

    tensorboard: Path | None = None
    mlflow: str | None = None
    wandb: Path | None = None
    redacted: bool = False

    @property
    def requested(self) -> bool:
        """Whether any tracker is requested."""
        return not (self.tensorboard is None and self.mlflow is None and self.wandb is None)

    def check(self) -> None:
        """Raise DdpDoctorError if a tracker would write into a recorded run or into a foreign database."""
        if not self.requested:
            return
        from ddpdoctor.rundir import is_recorded_file, is_run_directory
        from ddpdoctor.trackers import check_mlflow

        for option in ("tensorboard", "mlflow", "wandb"):
            place = getattr(self, option)
            if place is not None and "://" not in str(place):
                folder = os.path.realpath(place)
                if is_run_directory(folder) or is_recorded_file(folder):
                    raise DdpDoctorError(
                        f"--{option} {place} would write into a recorded run: name another folder."
                    )

        if self.mlflow is not None and "://" not in self.mlflow:
            check_mlflow(Path(self.mlflow).resolve())

    def write(self, diagnosis: Diagnosis, *, err: bool = False) -> None:
        """Write ``diagnosis`` to each tracker and print where, with ``err`` on stderr. Raises DdpDoctorError."""
        if not self.requested:
            return
        from ddpdoctor import trackers
        from ddpdoctor.report import redact

        run = trackers.tracker_run(redact(diagnosis) if self.redacted else diagnosis)
        if run.note:
            say(f"Note: {run.note}", err=True)
        if self.tensorboard is not None:
            files = trackers.write_tensorboard(run, self.tensorboard)
            say(f"written: {len(files)} event files in {files[0].parent}", err=err)
            say(f"To view them: tensorboard --logdir {shlex.quote(str(self.tensorboard))}", err=err)
        if self.mlflow is not None:
            view_command = trackers.log_to_mlflow(run, self.mlflow)
            say(f"logged to {self.mlflow}; to view it: {view_command}", err=err)
        if self.wandb is not None:
            sync_command = trackers.log_to_wandb(run, self.wandb)
            say(f"written to {self.wandb}, not uploaded; to upload it: {sync_command}", err=err)


def tracker_options(command: Command) -> Command:
    """``--tensorboard``, ``--mlflow``, ``--wandb`` and ``--redact``: the fields of :class:`Trackers`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_FOLDER = click.Path(path_type=Path, file_okay=False)
_OPTIONS = (
    click.option(
        "--tensorboard",
        type=_FOLDER,
        metavar="DIR",
        help="Write event files with times by step and rank, and findings as text (needs ddpdoctor[tensorboard]).",
    ),
    click.option(
        "--mlflow",
        metavar="DIR|URI",
        help="Log a run with parameters, metrics, verdict and report to a folder, a tracking server or a database "
        "(needs ddpdoctor[mlflow]).",
    ),
    click.option(
        "--wandb",
        type=_FOLDER,
        metavar="DIR",
        help="Write an offline run of Weights & Biases, which `wandb sync` uploads (needs ddpdoctor[wandb]).",
    ),
    click.option(
        "--redact",
        "redacted",
        is_flag=True,
        help="Remove host names, user names, paths and arguments from figures and trackers.",
    ),
)
