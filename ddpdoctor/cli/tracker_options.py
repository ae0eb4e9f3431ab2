"""The options of ``export`` that put a diagnosis into trackers of experiments, and what they do."""

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
    """Which were asked for."""

    tensorboard: Path | None = None
    mlflow: str | None = None
    wandb: Path | None = None
    redacted: bool = False

    @property
    def requested(self) -> bool:
        """Whether there is one."""
        return not (self.tensorboard is None and self.mlflow is None and self.wandb is None)

    def check(self) -> None:
        """Raises DdpDoctorError where one would write among what was recorded, or into a database of something else."""
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
        """Put ``diagnosis`` into each, and say where it is, with ``err`` on standard error. Raises DdpDoctorError."""
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
            say(f"Look at them: tensorboard --logdir {shlex.quote(str(self.tensorboard))}", err=err)
        if self.mlflow is not None:
            look = trackers.log_to_mlflow(run, self.mlflow)
            say(f"logged to {self.mlflow}; look at it: {look}", err=err)
        if self.wandb is not None:
            send = trackers.log_to_wandb(run, self.wandb)
            say(f"written to {self.wandb}, and sent nowhere; to send it: {send}", err=err)


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
        help="Write event files: times by step and rank, findings as text (needs ddpdoctor[tensorboard]).",
    ),
    click.option(
        "--mlflow",
        metavar="DIR|URI",
        help="Log a run: parameters, metrics, verdict, report; to a folder, or a tracking server's or database's URI "
        "(needs ddpdoctor[mlflow]).",
    ),
    click.option(
        "--wandb",
        type=_FOLDER,
        metavar="DIR",
        help="Write an offline run of Weights & Biases, which `wandb sync` sends (needs ddpdoctor[wandb]).",
    ),
    click.option(
        "--redact",
        "redacted",
        is_flag=True,
        help="For figures and trackers: remove host names, user names, paths and arguments.",
    ),
)
