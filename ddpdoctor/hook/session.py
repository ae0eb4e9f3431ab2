"""One recording, from the moment at which a process turns out to be a rank until its end.

That moment is ``init_process_group`` having returned in this very process: ``RANK`` in the environment says
nothing, it is
inherited by data loader workers and helper processes. A job without a process group is recorded, as rank 0 of
1, from its first
optimizer step on.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from threading import get_ident
from types import FrameType
from typing import Any, Dict, List, Optional

from ..rundir import Spool, id_of_root, reason_of
from . import environment, guard
from .numbered import Numbered
from .patching import guarded
from .recorder import Recorder
from .state import active
from .stepping import Stepping
from .where import Kinds

PATIENCE_S = 2.0
"""How long the job's end waits for the recording in all; the spool keeps what was not copied by then."""


class Session:
    """The recording of one rank."""

    def __init__(self, rank: int, world_size: int, run: str, spool: Spool) -> None:
        """``spool`` is the rank's."""
        from .backward import Backward
        from .dataloader import Loaders
        from .ddp import Models
        from .devices import devices_of
        from .writer import Writer

        self.rank, self.world_size = rank, world_size
        self.run, self.run_id = run, id_of_root(os.path.dirname(spool.directory))
        self.spool = spool
        self.document: Dict[str, Any] = {}
        """What rank.json says."""
        self.recorder = Recorder(self.spool, Kinds())
        self.stepping = Stepping(self.recorder)
        self.devices = devices_of(self.recorder)
        if self.devices is not None:
            self.stepping.at_every_step = self.devices.at_step
        self.backward, self.models, self.loaders = Backward(), Models(), Loaders()
        self.optimizers: Numbered[int] = Numbered()
        self.uses_grad_scaler = False
        self.thread_is_known = False
        """Whether an optimizer has stepped, and so told which thread trains."""
        self.closing: List[Any] = []
        """Called in turn, with nothing, at the end of the recording."""
        self.writer = Writer(self)
        self.patience_s = PATIENCE_S
        """What is left of the time that the job's end waits for the recording."""

    def begin(self) -> None:
        """Have what is recorded carried to the run directory. Raises OSError where that is another run's by now, or cannot be
        written to, and that shows soon; the spool is gone then."""
        try:
            self.writer.start()
        except OSError:
            active.stop()
            self.recorder.close()
            raise

    def follow_training_thread(self) -> None:
        """The calling thread steps the optimizer: it is the one to record."""
        self.thread_is_known = True
        if self.recorder.thread != get_ident():
            self.recorder.follow_this_thread()


current: Optional[Session] = None


def calling_frame() -> FrameType:
    """The caller's frame, for a source line."""
    return sys._getframe(1)


def arm(rank: int, world_size: int) -> Optional[Session]:
    """Start recording this process as ``rank``. Goes on with the recording there is when it is of the same
    rank.
    """
    global current
    if current is not None:
        if (current.rank, current.world_size) == (rank, world_size):
            return current
        disarm()
    run, place = os.environ.get(environment.RUN), os.environ.get(environment.SPOOL)
    if not run or not place:
        return None
    try:
        spool = Spool(place, rank, run)
        place = run
        session = Session(rank, world_size, run, spool)
        session.begin()
    except OSError as error:
        failing = guard.part("run directory")
        failing.off = True
        words = f"rank {rank} is not recorded, because {place} cannot be written ({reason_of(error)})"
        failing.failed(error, words, f"{words}; the job goes on.")
        return None
    from . import services

    services.start(session)
    current, active.recorder = session, session.recorder
    return session


_alone: List[bool] = []
"""Whether this process may be recorded without a process group; found out once."""


def arm_alone() -> Optional[Recorder]:
    """At an optimizer step outside of a process group: record a job of one process. None where this is not
    one.
    """
    if not _alone:
        _alone.append(_is_alone())
    if not _alone[0]:
        return None
    session = arm(0, 1)
    _alone[0] = session is not None
    return None if session is None else session.recorder


def arm_alone_now() -> Optional[Session]:
    """The same at a user's mark."""
    arm_alone()
    return current


def _is_alone() -> bool:
    if multiprocessing.parent_process() is not None:
        return False
    sizes = [
        os.environ.get(name) for name in ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    ]
    return all(size in (None, "", "1") for size in sizes)


def group_name(group: Any) -> str:
    """The process group's name, "0" for the default group."""
    if group is None:
        return "0"
    try:
        return str(group.group_name).replace('"', "'")
    except AttributeError:
        return "?"


def flush() -> None:
    """Bring everything to the run directory: the process may be about to die. Returns when that is done."""
    session = current
    if session is not None and session.recorder.pid == os.getpid():
        from . import services

        services.flush(session)


def disarm() -> None:
    """End the recording in an orderly way."""
    global current
    session = current
    if session is not None and session.recorder.pid == os.getpid():
        from . import services

        services.stop(session)
    current = None
    active.stop()


def forget() -> None:
    """In a forked child: the recording is the parent's. The child may still become a rank of its own."""
    global current
    current = None
    active.stop()
    del _alone[:]
    guard.reset()
    for name in ("collectives", "checkpoints", "optimizers"):
        module = sys.modules.get(f"{__package__}.{name}")
        if module is not None:
            module.reset()


def _at_exit() -> None:
    try:
        disarm()
    except Exception as error:
        guard.part("end of the job").failed(error)


def _close_window() -> None:
    """A profiler that is still open where the interpreter ends crashes the process."""
    window = sys.modules.get(f"{__package__}.window")
    if window is not None:
        window.close_left_open()


def watch_process() -> None:
    """Once per process: end the recording at exit, forget it in forked children."""
    atexit.register(
        guarded(guard.part("profiler window"), _close_window)
    )  # the last one registered is called first
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=guarded(guard.part("fork"), forget))
