"""Which recorder is recording in this process: the one thing that all hooks look at first."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from .recorder import Recorder


class Active:
    """``recorder`` is None in every process that is not, or not yet, a rank."""

    __slots__ = ("recorder",)

    def __init__(self) -> None:
        self.recorder: Optional[Recorder] = None


active = Active()


def job_torch() -> Any:
    """The job's torch, of whatever version: what it holds is asked for, not assumed."""
    return sys.modules["torch"]
