"""ddpdoctor: finds out why a PyTorch DistributedDataParallel job is slow.

The import is light on purpose: a training script may ``import ddpdoctor`` for :func:`step`, and a job must not pay
for the analysis it does not run.
"""

from __future__ import annotations

import sys

__version__ = "0.1.0"


def step() -> None:
    """Mark the end of a training step, for loops whose optimizer is not a ``torch.optim.Optimizer``.

    Under ``ddpdoctor run`` the mark ends the step on this rank; anywhere else it does nothing.
    """
    hook = sys.modules.get("_ddpdoctor.hook.marks")
    if hook is not None:
        hook.step()
