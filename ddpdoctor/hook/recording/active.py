"""The recording of this process, and what it records of the current step. All wrappers check this first."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ..patching import Switch

if TYPE_CHECKING:
    from .recorder import Recorder
    from .session import Session


class EveryStep:
    """Attributes of the recorder that are read in every step. Slots are next to each other in memory, in few lines of a cold cache."""

    __slots__ = (
        "_start",
        "brief_until",
        "calls",
        "epoch_offset_ns",
        "events",
        "heartbeat",
        "marks",
        "pending",
        "step",
        "thread",
    )


class BackwardSwitch(Switch):
    """Whether wrappers of backwards record. If ``always`` is set, also in steps of which only the times are kept."""

    __slots__ = ("always", "usual")

    def __init__(self) -> None:
        super().__init__(True)
        self.always = True
        """Set if optimizers step inside backwards, whose start and end are then needed, or if this torch does not report that it is
        inside a backward."""
        self.usual: Any = None
        """The ``Backward`` of the session, which describes the call of its usual backward; None while that is unknown."""


class OptimizerStarts(Switch):
    """Whether hooks before optimizer steps do anything. They need not if only the times of steps are kept and the end of one
    optimizer's step ends each step. Such steps are called brief."""

    __slots__ = ("_reference", "caller", "optimizer_id")

    def __init__(self) -> None:
        super().__init__(True)
        self.optimizer_id = 0
        """The id of that optimizer; 0 once it is gone, or if it cannot be recognized by identity."""
        self._reference: weakref.ref[Any] | None = None
        self.caller: Any = None
        """The code that calls its step. A call from other code may be part of another optimizer's step."""

    def expect(self, optimizer: Any, is_recognizable: bool, caller: Any) -> None:
        """Expect the next steps to be brief ones of ``optimizer``, called in the frame ``caller``."""
        self.optimizer_id = 0
        self._reference = weakref.ref(optimizer, self._forget) if is_recognizable else None
        self.optimizer_id = id(optimizer) if is_recognizable else 0
        self.caller = caller.f_code

    def _forget(self, reference: weakref.ref[Any]) -> None:
        # Python calls it before another object can get the id, and not for a reference that has been replaced.
        self.optimizer_id = 0


class Active(Switch):
    """The recording of this process. ``full``: the events of the current step are recorded, not only its times."""

    __slots__ = ("recorder", "session")

    def __init__(self) -> None:
        super().__init__(False)
        self.session: Session | None = None
        """None if the process is not a rank, or not yet."""
        self.recorder: Recorder | None = None
        """The session's recorder, which most wrappers use."""

    def start(self, session: Session) -> None:
        """Record this process from now on."""
        self.session, self.recorder = session, session.recorder

    def record(self, full: bool) -> None:
        """Set ``full`` for the step that begins."""
        self.full = full
        backwards.full = full or backwards.always
        starts.full = True

    def stop(self) -> None:
        """End the recording of this process."""
        self.session = self.recorder = backwards.usual = None
        self.record(full=False)


active = Active()
backwards = BackwardSwitch()
starts = OptimizerStarts()
