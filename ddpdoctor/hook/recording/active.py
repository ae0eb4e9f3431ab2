"""What records in this process, and what of the step in progress: the first thing that all wrappers look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from ..patching import Seen

if TYPE_CHECKING:
    from .recorder import Recorder
    from .session import Session


class Backwards(Seen):
    """Whether backwards are looked at: also in steps of which only the times are kept, where ``always`` is set."""

    __slots__ = ("always",)

    def __init__(self) -> None:
        super().__init__(True)
        self.always = True
        """Optimizers step inside of backwards, so their beginning and end count; or this torch cannot tell, inside of one,
        that it is in one."""


class Active(Seen):
    """The one recording there is. ``full``: the events of the step in progress are recorded, not only its times."""

    __slots__ = ("recorder", "session")

    def __init__(self) -> None:
        super().__init__(False)
        self.session: Optional[Session] = None
        """None in every process that is not, or not yet, a rank."""
        self.recorder: Optional[Recorder] = None
        """The session's: what most wrappers want of it."""

    def start(self, session: Session) -> None:
        """From now on this process is recorded."""
        self.session, self.recorder = session, session.recorder

    def record(self, full: bool) -> None:
        """Set ``full``, for the step that begins."""
        self.full = full
        backwards.full = full or backwards.always

    def stop(self) -> None:
        """Nobody records any more."""
        self.session = self.recorder = None
        self.record(full=False)


active = Active()
backwards = Backwards()
