"""Which recorder is recording in this process, and what of the step in progress: the first thing that all hooks look at."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from .recorder import Recorder


class Seen:
    """Whether some kind of call is looked at, in the step in progress."""

    __slots__ = ("full",)

    def __init__(self, full: bool) -> None:
        self.full = full


class Backwards(Seen):
    """Whether backwards are: also in steps of which only the times are kept, where ``always`` is set."""

    __slots__ = ("always",)

    def __init__(self) -> None:
        super().__init__(True)
        self.always = True
        """Optimizers step inside of backwards, so their beginning and end count; or this torch cannot tell, inside of one,
        that it is in one."""


class Active(Seen):
    """``recorder`` is None in every process that is not, or not yet, a rank. ``full``: the events of the step in progress
    are recorded, not only its times.
    """

    __slots__ = ("recorder",)

    def __init__(self) -> None:
        super().__init__(False)
        self.recorder: Optional[Recorder] = None

    def record(self, full: bool) -> None:
        """Set ``full``, for the step that begins."""
        self.full = full
        backwards.full = full or backwards.always

    def stop(self) -> None:
        """Nobody records any more."""
        self.recorder = None
        self.record(full=False)


always = Seen(True)
active = Active()
backwards = Backwards()


def job_torch() -> Any:
    """The job's torch, of whatever version: what it holds is asked for, not assumed."""
    return sys.modules["torch"]
