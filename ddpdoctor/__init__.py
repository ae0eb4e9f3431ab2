"""ddpdoctor: finds out why a PyTorch DistributedDataParallel job is slow.

The import is light on purpose: a training script may ``import ddpdoctor`` for :func:`step`, and a job must
not pay for the analysis it does not run.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike

    from ddpdoctor.diagnose.diagnosis import Diagnosis

__version__ = "0.1.0"


def step() -> None:
    """Mark the end of a training step, for loops whose optimizer is not a ``torch.optim.Optimizer``.

    Under ``ddpdoctor run`` the mark ends the step on this rank; anywhere else it does nothing.
    """
    hook = sys.modules.get("_ddpdoctor.hook.marks")
    if hook is not None:
        hook.step()


def analyze(*paths: str | PathLike[str]) -> Diagnosis:
    """Diagnose one job: its run directory (several where its hosts wrote to separate folders), or profiler
    traces.

    What ``ddpdoctor analyze`` does with its defaults, without printing. Raises ddpdoctor.errors.UnusableInput
    where nothing can be analysed; whatever is missing or broken besides is named in ``notes``.
    """
    from ddpdoctor.analysis import analyze as analyze_paths

    return analyze_paths([str(path) for path in paths])
