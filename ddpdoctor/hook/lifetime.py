"""Where the recording of a process begins and ends.

It begins when ``init_process_group`` has returned in this very process: ``RANK`` in the environment says nothing, it is
inherited by data loader workers and helper processes. A job without a process group is recorded, as rank 0 of 1, from its
first optimizer step on.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
from typing import Callable

from ..rundir import Spool, reason_of
from . import environment, guard, services
from .patching import guarded
from .profiling import close_left_open
from .recording import Session, active
from .stalls import (
    begin_unjoined,
    end_unjoined,
    forget_faults,
    forget_unjoined,
    set_fatal_exception,
    write_unjoined_end,
)

_MANY_PROCESSES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables in which launchers of several processes say how many they start: torchrun, Slurm, Open MPI, MPICH."""

at_fork: list[Callable[[], None]] = []
"""Functions to call in a forked child, where calls in progress are the parent's."""
depths: list[list[int]] = []
"""Counters of nested calls in progress; set to 0 in a forked child."""
_PART = guard.part("end of the job")

_alone: list[bool] = []
"""Whether this process may be recorded without a process group; determined once."""


def arm(rank: int, world_size: int, joining_ns: int | None = None) -> Session | None:
    """Start recording this process as ``rank``, or continue the present recording if it is of the same rank. ``joining_ns``: when
    it called ``init_process_group``, epoch ns."""
    session = active.session
    if session is not None:
        if (session.rank, session.world_size) == (rank, world_size):
            return session
        disarm()
    run, place = os.environ.get(environment.RUN), os.environ.get(environment.SPOOL)
    if not run or not place:
        return None
    session = _begun(rank, world_size, run, place)
    end_unjoined()
    if session is not None:
        session.joining_ns = joining_ns
        services.start(session)
        active.start(session)
    return session


def _begun(rank: int, world_size: int, run: str, place: str) -> Session | None:
    """A new recording, with its spool in ``place``; None if it cannot be written, which is reported to the user."""
    refusing = place
    try:
        spool = Spool(place, rank, run)
        refusing = run
        session = Session(rank, world_size, run, spool)
        session.begin()
        return session
    except OSError as error:
        failing = guard.part("run directory")
        failing.off = True
        words = f"rank {rank} is not recorded, because {refusing} cannot be written ({reason_of(error)})"
        failing.failed(error, words, f"{words}; the job goes on.")
        return None


def arm_alone() -> Session | None:
    """At an optimizer step, or a user's mark, outside of a process group: record a job of one process. None where this is not
    one."""
    if not _alone:
        is_child = multiprocessing.parent_process() is not None
        one = all(os.environ.get(name) in (None, "", "1") for name in _MANY_PROCESSES)
        _alone.append(one and not is_child)
    if not _alone[0]:
        return None
    session = arm(0, 1)
    _alone[0] = session is not None
    return session


def flush() -> None:
    """Copy everything recorded to the run directory, because the process may be about to die. Waits for the copy,
    for a limited time."""
    session = active.session
    if session is not None and session.recorder.pid == os.getpid():
        services.flush(session)


def disarm() -> None:
    """End the recording in an orderly way."""
    session = active.session
    if session is not None and session.recorder.pid == os.getpid():
        services.stop(session)
    active.stop()


def forget() -> None:
    """In a forked child: the recording is the parent's. The child may still become a rank of its own."""
    active.stop()
    forget_faults()
    forget_unjoined()
    del _alone[:]
    guard.reset()
    for reset in at_fork:
        reset()
    for depth in depths:
        depth[0] = 0


def write_end_status(error: BaseException | None = None) -> None:
    """Write how the process ends, just before it does: by ``error`` if a caught exception ends it."""
    if error is not None:
        set_fatal_exception(error)
    session = active.session
    if session is not None and session.recorder.pid == os.getpid():
        guarded(_PART, services.write_end_status)(session)
    write_unjoined_end()


def _at_exit() -> None:
    try:
        write_end_status()
        disarm()
    except Exception as error:
        _PART.failed(error)


def watch_process() -> None:
    """Once per process: end the recording at exit, forget it in forked children, and say that it may become a rank."""
    begin_unjoined()
    # The one registered last is called first. A profiler that is still open where the interpreter ends crashes the process.
    atexit.register(guarded(guard.part("profiler window"), close_left_open))
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=guarded(guard.part("fork"), forget))
