"""A diagnosis in the tools in which a team follows its experiments: TensorBoard, MLflow, Weights & Biases.

In: a :class:`~ddpdoctor.diagnose.diagnosis.Diagnosis`. Out: files, by each tool's own package, which is imported when it is asked for.
``tracked`` decides once what of a diagnosis goes there, and how much; one module for each tool says it in that tool's words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.deferred import deferred

if TYPE_CHECKING:
    from .to_mlflow import check_mlflow, log_to_mlflow
    from .to_tensorboard import write_tensorboard
    from .to_wandb import log_to_wandb
    from .tracked import Tracked, tracked


__getattr__ = deferred(
    __name__,
    {
        "to_mlflow": "check_mlflow log_to_mlflow",
        "to_tensorboard": "write_tensorboard",
        "to_wandb": "log_to_wandb",
        "tracked": "Tracked tracked",
    },
)
