"""The helpers of a recording, started and ended with it: writer, sampler, settings, status thread and profiler
window."""

from __future__ import annotations

import time
from typing import Callable

from ..rundir import LineField, accept_workers
from . import settings
from .guard import part
from .patching import guarded
from .profiling import Captures, Sampler, Window, forget
from .recording import LAST_SETTINGS_STEP, Session
from .stalls import StatusThread

_PART = part("step log")
_LOADER_WORKERS = part("data loader workers")
_COPYING_S = 0.5
"""The part of the wait at the job's end that is reserved for the last copy to the run directory."""
_NO_WAIT_S = 0.25
"""Duration of an end that does not reduce the session's budget: some jobs end their process group many times."""


class Services:
    """The helpers of one session."""

    def __init__(self, session: Session) -> None:
        self.sampler = Sampler(session)
        window = Window(session, session.writer)
        self.at_step = guarded(window.part, window.at_step)
        self.captures = Captures(session, session.writer, window)
        self.status_thread = StatusThread(session, self.captures)


at_start: list[Callable[[Session], None]] = []
"""Called with each session that begins, once it knows its settings."""


def start(session: Session) -> None:
    """Start the session's helpers and fill in rank.json."""
    session.document = settings.at_start(session)
    session.services = services = Services(session)
    guarded(_LOADER_WORKERS, accept_workers)(session.spool)

    def describe() -> None:
        settings.after_first_steps(session)
        session.writer.document_changed.set()

    def at_step(step: int) -> None:
        if step == LAST_SETTINGS_STEP:
            describe()

    session.recorder.describe = guarded(_PART, describe)
    session.stepping.on_step.append(guarded(_PART, at_step))
    for begin in at_start:
        guarded(_PART, begin)(session)
    session.stepping.on_step.append(services.at_step)
    session.writer.document_changed.set()
    services.sampler.start()
    services.status_thread.start()


def flush(session: Session, ending: bool = False) -> None:
    """Copy everything recorded so far to the run directory, within the time that the job's end may wait.

    The rest stays in the spool. ``ending``: nothing is recorded any more.
    """
    services: Services | None = session.services
    if services is None:
        return
    begun_s = time.monotonic()
    closing_s = _end_steps(session, services, begun_s + session.patience_s - _COPYING_S)
    deadline_s = max(begun_s + closing_s + session.patience_s, time.monotonic() + _NO_WAIT_S)
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
    session.patience_s -= min(session.patience_s, max(0.0, waited_s - _NO_WAIT_S))


def _end_steps(session: Session, services: Services, deadline_s: float) -> float:
    """Finish what the steps so far have begun, waiting for the window until ``deadline_s`` (monotonic). Returns how
    long torch took to close the profiler, s."""
    captures = services.captures
    closed_before_s = captures.closing_s
    session.stepping.finish()
    if session.devices is not None:
        session.devices.finish()
    settings.after_first_steps(session)
    captures.finish(deadline_s)
    return captures.closing_s - closed_before_s


def _report_uncopied(session: Session) -> None:
    record = f"{session.run} did not accept in time what rank {session.rank} recorded last"
    message = (
        f"{record}; it waits in {session.spool.directory}, and `ddpdoctor analyze {session.run}` fetches it."
    )
    part("end of the job").failed(TimeoutError(record), record, message)


def write_end_status(session: Session) -> None:
    """Write how the interpreter ends."""
    if session.services is not None:
        session.services.status_thread.write_end_status()


def stop(session: Session) -> None:
    """Flush, then end the session."""
    try:
        flush(session, ending=True)
    finally:
        session.services = None
        forget(session)
