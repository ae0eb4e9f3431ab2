"""Exports a diagnosis to experiment trackers: TensorBoard, MLflow, Weights & Biases.

``contents`` selects the exported data of a :class:`~ddpdoctor.diagnose.diagnosis.Diagnosis` and limits its size
(:class:`TrackerRun`). One module per tracker writes it with the tracker's own package, which is imported only if used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.deferred import deferred
from ddpdoctor.errors import DdpDoctorError

if TYPE_CHECKING:
    from .contents import TrackerRun, tracker_run
    from .to_mlflow import check_mlflow, log_to_mlflow
    from .to_tensorboard import write_tensorboard
    from .to_wandb import log_to_wandb


__getattr__ = deferred(
    __name__,
    {
        "contents": "TrackerRun tracker_run",
        "to_mlflow": "check_mlflow log_to_mlflow",
        "to_tensorboard": "write_tensorboard",
        "to_wandb": "log_to_wandb",
    },
)


def missing_package(extra: str, error: ImportError) -> DdpDoctorError:
    """The error if the package of the tracker ``extra``, which is both an option and an extra, cannot be imported."""
    return DdpDoctorError(
        f"--{extra} needs its package ({error}): pip install '.[{extra}]' in a checkout of ddpdoctor."
    )
