"""Starts and ends the recording of a process, with all that belongs to it: writer, sampler, settings, status thread and profiler
window.

The recording starts when ``init_process_group`` has returned in this process. A ``RANK`` in the environment does not show that a
process is a rank, because data loader workers and helper processes inherit it. A job without a process group is recorded as rank
0 of 1, from its first optimizer step.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import time
from typing import Callable

from ..rundir import reason_of
from ..rundir.spool import Spool, accept_workers
from ..rundir.stepevents import LineField
from . import environment, guard, rank_document
from .patching import guarded
from .profiling import Captures, Sampler, Window, close_left_open, forget_windows, leave_parents_windows
from .recording import LAST_SETTINGS_STEP, Session, active
from .stalls import (
    StatusThread,
    begin_unjoined,
    end_unjoined,
    forget_faults,
    forget_unjoined,
    set_fatal_exception,
    write_unjoined_end,
)

_WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables in which launchers put the number of processes: torchrun, Slurm, Open MPI, MPICH."""

_STEP_LOG = guard.part("step log")
_LOADER_WORKERS = guard.part("data loader workers")
_COPY_RESERVE_S = 0.5
"""Seconds of the budget for waiting at the job's end that are reserved for the last copy to the run directory."""
_FREE_FLUSH_S = 0.25
"""A flush reduces the session's budget for waiting only by what it takes beyond this, s, because some jobs destroy their process
group, which flushes, many times."""


class Services:
    """The helpers of one session."""

    def __init__(self, session: Session) -> None:
        self.sampler = Sampler(session)
        window = Window(session)
        self.at_step = guarded(window.part, window.at_step)
        self.captures = Captures(session, window)
        self.status_thread = StatusThread(session, self.captures)


at_start: list[Callable[[Session], None]] = []
"""Functions to call with each new session, after its settings have been read."""


def _start(session: Session) -> None:
    session.document = rank_document.at_start(session)
    session.services = services = Services(session)
    guarded(_LOADER_WORKERS, accept_workers)(session.spool)

    def describe() -> None:
        rank_document.after_first_steps(session)
        session.writer.document_changed.set()

    def at_step(step: int) -> None:
        if step == LAST_SETTINGS_STEP:
            describe()

    session.recorder.describe = guarded(_STEP_LOG, describe)
    session.stepping.on_step.append(guarded(_STEP_LOG, at_step))
    for begin in at_start:
        guarded(_STEP_LOG, begin)(session)
    session.stepping.on_step.append(services.at_step)
    session.writer.document_changed.set()
    services.sampler.start()
    services.status_thread.start()


def _flush(session: Session, ending: bool = False) -> None:
    """Copy everything recorded so far to the run directory, within the session's remaining budget for waiting. What is not copied
    in time stays in the spool. ``ending``: this is the last flush of the session."""
    services: Services | None = session.services
    if services is None:
        return
    begun_s = time.monotonic()
    closing_s = _end_steps(session, services, begun_s + session.end_budget_s - _COPY_RESERVE_S)
    deadline_s = max(begun_s + closing_s + session.end_budget_s, time.monotonic() + _FREE_FLUSH_S)
    session.document["ended_ns"] = time.time_ns()
    recorder = session.recorder
    recorder.write_now(f"{{{LineField.END.key}true{LineField.TIME_NS.next_key}{time.time_ns()}}}\n")
    recorder.heartbeat.end(recorder.step)
    if ending:
        services.sampler.stop(deadline_s)
        services.status_thread.stop()
    services.sampler.write_out(deadline_s)
    if not session.writer.flush(deadline_s, ending):
        _report_uncopied(session)
    waited_s = time.monotonic() - begun_s - closing_s
    session.end_budget_s -= min(session.end_budget_s, max(0.0, waited_s - _FREE_FLUSH_S))


def _end_steps(session: Session, services: Services, deadline_s: float) -> float:
    """Close the last step and the profiler window; wait for the window until ``deadline_s`` (monotonic). Returns the time that
    torch took to close the profiler, s, which does not count against the budget."""
    captures = services.captures
    closed_before_s = captures.closing_s
    session.stepping.finish()
    if session.devices is not None:
        session.devices.finish()
    rank_document.after_first_steps(session)
    captures.finish(deadline_s)
    return captures.closing_s - closed_before_s


def _report_uncopied(session: Session) -> None:
    record = f"{session.run} did not accept in time what rank {session.rank} recorded last"
    message = (
        f"{record}; it waits in {session.spool.directory}, and `ddpdoctor analyze {session.run}` fetches it."
    )
    guard.part("end of the job").failed(TimeoutError(record), record, message)


def _stop(session: Session) -> None:
    try:
        _flush(session, ending=True)
    finally:
        session.services = None
        forget_windows(session)


at_fork: list[Callable[[], None]] = []
"""Functions to call in a forked child, to reset state that belongs to calls in progress in the parent."""
_PART = guard.part("end of the job")

_may_record_alone: list[bool] = []
"""Whether this process may be recorded without a process group. Empty until determined."""


def arm(rank: int, world_size: int, joining_ns: int | None = None) -> Session | None:
    """Start recording this process as ``rank``, or continue the current recording if it has the same rank and world size. Returns
    None if the process cannot be recorded. ``joining_ns``: when ``init_process_group`` was called, epoch ns."""
    session = active.session
    if session is not None:
        if (session.rank, session.world_size) == (rank, world_size):
            return session
        disarm()
    run, spool_root = os.environ.get(environment.RUN), os.environ.get(environment.SPOOL)
    if not run or not spool_root:
        return None
    session = _new_session(rank, world_size, run, spool_root)
    end_unjoined()
    if session is not None:
        session.joining_ns = joining_ns
        _start(session)
        active.start(session)
    return session


def _new_session(rank: int, world_size: int, run: str, spool_root: str) -> Session | None:
    """Create a session with its spool in ``spool_root``. If the spool cannot be written, report that to the user and return
    None."""
    unwritable = spool_root
    try:
        spool = Spool(spool_root, rank, run)
        unwritable = run
        session = Session(rank, world_size, run, spool)
        session.begin()
        return session
    except OSError as error:
        failed_part = guard.part("run directory")
        failed_part.off = True
        reason = f"rank {rank} is not recorded, because {unwritable} cannot be written ({reason_of(error)})"
        failed_part.failed(error, reason, f"{reason}; the job goes on.")
        return None


def arm_alone() -> Session | None:
    """Start recording a job of one process, at an optimizer step or a step marked by the user, if there is no process group.
    Returns None if this process is not such a job."""
    if not _may_record_alone:
        is_child = multiprocessing.parent_process() is not None
        is_single = all(os.environ.get(name) in (None, "", "1") for name in _WORLD_SIZE_VARIABLES)
        _may_record_alone.append(is_single and not is_child)
    if not _may_record_alone[0]:
        return None
    session = arm(0, 1)
    _may_record_alone[0] = session is not None
    return session


def flush() -> None:
    """Copy everything recorded so far to the run directory, because the process may be about to die. Waits only for a limited
    time."""
    session = active.session
    if session is not None and session.recorder.pid == os.getpid():
        _flush(session)


def disarm() -> None:
    """End the recording and flush it."""
    session = active.session
    if session is not None and session.recorder.pid == os.getpid():
        _stop(session)
    active.stop()


def forget() -> None:
    """Drop the parent's recording in a forked child. The child may still become a rank itself."""
    active.stop()
    forget_faults()
    forget_unjoined()
    del _may_record_alone[:]
    guard.reset()
    for reset in at_fork:
        reset()
    leave_parents_windows()


def write_end_status(error: BaseException | None = None) -> None:
    """Write how the process ends, just before it ends. ``error``: the exception that ends it, if one was caught."""
    if error is not None:
        set_fatal_exception(error)
    session = active.session
    if session is not None and session.services is not None and session.recorder.pid == os.getpid():
        guarded(_PART, session.services.status_thread.write_end_status)()
    write_unjoined_end()


def _at_exit() -> None:
    try:
        write_end_status()
        disarm()
    except Exception as error:
        _PART.failed(error)


def watch_process() -> None:
    """Register the handlers for exit and fork, and create the status file of a rank that has not joined. Called once per process."""
    begin_unjoined()
    # atexit calls the functions registered last first, so this one runs after _at_exit. It closes a profiler that is still open,
    # because that would crash the process at interpreter exit.
    atexit.register(guarded(guard.part("profiler window"), close_left_open))
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=guarded(guard.part("fork"), forget))


_MARKS = guard.part("step marks")


def _mark() -> None:
    session = active.session or arm_alone()
    if session is not None:
        session.follow_training_thread()
        session.stepping.mark()


step = guarded(_MARKS, _mark)
"""Called by ``ddpdoctor.step()`` in a rank."""
