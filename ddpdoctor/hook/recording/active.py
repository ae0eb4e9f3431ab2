"""What records in this process, and what of the step in progress: the first thing that all wrappers look at."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Callable

from ..patching import Switch

if TYPE_CHECKING:
    from .recorder import Recorder
    from .session import Session


class Backwards(Switch):
    """Whether backwards are looked at: also in steps of which only the times are kept, where ``always`` is set."""

    __slots__ = ("always",)

    def __init__(self) -> None:
        super().__init__(True)
        self.always = True
        """Optimizers step inside of backwards, so their beginning and end count; or this torch cannot tell, inside of one,
        that it is in one."""


def _no_optimizer() -> None:
    return None


class Starts(Switch):
    """Whether starts of optimizer steps are looked at. They need not be in a row of steps of which only the times are kept, where
    one optimizer alone says by its end that a step has ended: such steps are brief."""

    __slots__ = ("alone", "caller")

    def __init__(self) -> None:
        super().__init__(True)
        self.alone: Callable[[], Any] = _no_optimizer
        """Gives that optimizer, which is held weakly; None where it is not known by sight."""
        self.caller: Any = None
        """The code that calls its step: from elsewhere it may be a part of another optimizer's."""

    def expect(self, optimizer: Any, by_sight: bool, caller: Any) -> None:
        """The next steps are brief ones of ``optimizer``, called in the frame ``caller``."""
        self.alone = weakref.ref(optimizer) if by_sight else _no_optimizer
        self.caller = caller.f_code


class Active(Switch):
    """The one recording there is. ``full``: the events of the step in progress are recorded, not only its times."""

    __slots__ = ("recorder", "session")

    def __init__(self) -> None:
        super().__init__(False)
        self.session: Session | None = None
        """None in every process that is not, or not yet, a rank."""
        self.recorder: Recorder | None = None
        """The session's: what most wrappers want of it."""

    def start(self, session: Session) -> None:
        """From now on this process is recorded."""
        self.session, self.recorder = session, session.recorder

    def record(self, full: bool) -> None:
        """Set ``full``, for the step that begins."""
        self.full = full
        backwards.full = full or backwards.always
        starts.full = True

    def stop(self) -> None:
        """Nobody records any more."""
        self.session = self.recorder = None
        self.record(full=False)


active = Active()
backwards = Backwards()
starts = Starts()
