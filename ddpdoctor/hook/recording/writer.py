"""The thread that writes rank.json, and copies the spool to the run directory if no launcher's process does.

If a launcher runs on this host, a process of its own copies (:mod:`...rundir.host_files`) and no rank touches the run
directory: a process that waits for storage which has stopped answering cannot end. If ranks have no launcher on their
host, as on a Ray cluster, this thread copies, and the training thread does not wait for it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...rundir import (
    RANK_FILE,
    BusyError,
    DiskBudget,
    copier_lock_is_held,
    discard,
    drain,
    rank_budget,
    reason_of,
)
from .. import guard
from ..patching import guarded

if TYPE_CHECKING:
    from .session import Session

PERIOD_S = 1.0
"""Seconds between two copies: what is lost with a host that dies."""
CHECK_PERIOD_S = 5.0
"""The same if a launcher's process copies, which is checked then: the spool survives a process that dies. A check takes 0.4 ms of CPU time
with cold caches."""
START_S = 1.0
"""Seconds that the start of a recording waits to learn whether the run directory is writable."""
_LOOK_S = 0.1
"""Seconds between two checks whether the thread is alive, while waiting for it."""
_PART = guard.part("run directory")


def _lost_messages(lost: Sequence[tuple[int, int]], why: str | None) -> list[str]:
    """Sentences on what was not recorded because there was no room for it."""
    if not lost:
        return [why] if why else []
    steps = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in lost)
    return [f"steps {steps} were not recorded: {why}."]


class Writer:
    """Writes rank.json to the spool, and copies the spool if no launcher's process does, once a second and on
    request."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.document_changed = threading.Event()
        self._requested = threading.Event()
        self._requests: deque[threading.Event] = deque()
        """Set after a copy that began after the request."""
        self._ending = self._abandoned = False
        self._claimed = threading.Event()
        self._refused: OSError | None = None
        self._copied_by_launcher = False
        self._dropped = 0
        """Lost records that rank.json reports."""
        # A request for a copy interrupts the thinning of the log.
        self._budget = DiskBudget(rank_budget(session.world_size), lambda: not self._requested.is_set())
        self._thread = threading.Thread(
            target=guarded(_PART, self._run), name="ddpdoctor-writer", daemon=True
        )

    def start(self) -> None:
        """Start the thread, which claims a folder in the run directory. Raises OSError where it shows soon that it cannot:
        the thread ends then, and the spool is gone."""
        self._thread.start()
        self._claimed.wait(START_S)
        if self._refused is not None:
            self._abandoned = True
            discard(self._session.spool.directory)
            raise self._refused

    def flush(self, deadline_s: float, ending: bool = False) -> bool:
        """Wait until everything recorded so far is in the run directory, at most until ``deadline_s``, monotonic; False
        where that came first. ``ending``: nothing more is recorded; the spool, copied, is removed, and the thread ends.
        """
        request = threading.Event()
        self._ending = self._ending or ending
        self._requests.append(request)
        self._requested.set()
        self.document_changed.set()
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            if request.wait(min(_LOOK_S, max(0.0, deadline_s - time.monotonic()))):
                return True
        return request.is_set()

    def _run(self) -> None:
        try:
            if not self._launcher_copies():
                drain(self._session.spool.directory)
        except OSError as error:
            self._refused = error
        finally:
            self._claimed.set()
        self.document_changed.wait(PERIOD_S)
        while not self._abandoned:
            self._requested.clear()
            changed, ending = self.document_changed.is_set(), self._ending
            self.document_changed.clear()
            requests = [self._requests.popleft() for _ in range(len(self._requests))]
            try:
                copied = self._copy(changed, ending)
            except BusyError:
                self._requests.extend(requests)
                continue
            for request in requests:
                request.set()
            if ending:
                return
            # What cannot be written is tried again, but no faster than the rest.
            changed_again = self.document_changed if copied else self._requested
            changed_again.wait(CHECK_PERIOD_S if self._copied_by_launcher else PERIOD_S)

    def _copy(self, changed: bool, ending: bool) -> bool:
        """Rewrite rank.json where it has changed, and drain the spool. A failure is counted, and tried again later:
        the spool keeps what was not copied. Raises BusyError if another process or thread copies it."""
        session = self._session
        try:
            # For who reads the log while no status thread runs.
            session.recorder.write_brief_steps()
            dropped, self._dropped = self._dropped, session.spool.dropped
            if session.spool.restore() or changed or dropped != self._dropped:
                data = json.dumps(self._current_document(), separators=(",", ":"), default=str)
                session.spool.keep(RANK_FILE, data.encode())
            if ending:
                session.spool.close()
        except Exception as error:
            self.document_changed.set()
            self._failed(error)
        try:
            if not self._launcher_copies():
                drain(session.spool.directory, remove=ending, budget=self._budget)
        except BusyError:
            raise
        except Exception as error:
            self._failed(error)
            self.document_changed.set()
            return False
        return True

    def _launcher_copies(self) -> bool:
        self._copied_by_launcher = copier_lock_is_held(os.path.dirname(self._session.spool.directory))
        return self._copied_by_launcher

    def _current_document(self) -> dict[str, Any]:
        session = self._session
        recorder = session.recorder
        errors = list(guard.errors) + _lost_messages(recorder.lost, session.spool.error)
        session.document["hook"] = {"errors": errors}
        return session.document

    def _failed(self, error: Exception) -> None:
        try:
            record = message = ""
            if isinstance(error, OSError):
                session = self._session
                record = f"{session.run} could not be written ({reason_of(error)})."
                message = (
                    f"what rank {session.rank} records cannot be written to {session.run} ({reason_of(error)}); "
                    "it waits in memory, and the job goes on."
                )
            _PART.failed(error, record, message)
            # A full disk may be emptied, a file server may come back: this part never gives up.
            _PART.off = False
        except Exception:
            pass
