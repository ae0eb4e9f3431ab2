"""The thread that writes rank.json, and copies the spool to the run directory if no process of the launcher does.

If there is a launcher on this host, its storage process copies (:mod:`...rundir.host_files`) and no rank accesses the run
directory, because a process that waits for storage which does not answer cannot end. Without a launcher on the host, as on a Ray
cluster, this thread copies, and the training thread does not wait for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...rundir import RANK_FILE, reason_of
from ...rundir.compaction import DiskBudget, rank_budget
from ...rundir.draining import BusyError, discard, drain
from ...rundir.host_files import copier_lock_is_held
from .. import guard
from ..patching import guarded

if TYPE_CHECKING:
    from .session import Session

PERIOD_S = 1.0
"""Seconds between two copies. So much is lost if the host fails."""
CHECK_PERIOD_S = 10.0
"""Seconds between two checks that the launcher's process still copies; the spool survives the end of that process. A check takes
0.3 ms of CPU time with cold caches."""
START_S = 1.0
"""Seconds that the start of a recording waits to learn whether the run directory is writable."""
_LOOK_S = 0.1
"""Seconds between two checks whether the thread is alive, while waiting for it."""
_PART = guard.part("run directory")


def _lost_messages(lost: Sequence[tuple[int, int]], why: str | None) -> list[str]:
    """Sentences about what was not recorded because there was no room for it."""
    if not lost:
        return [why] if why else []
    steps = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in lost)
    return [f"steps {steps} were not recorded: {why}."]


class Writer:
    """Writes rank.json to the spool. Copies the spool once a second and on request if no process of the launcher does."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.document_changed = threading.Event()
        self._requested = threading.Event()
        self._requests: deque[threading.Event] = deque()
        """Each is set after a copy that began after the request."""
        self._ending = self._abandoned = False
        self._claimed = threading.Event()
        self._start_error: OSError | None = None
        self._copied_by_launcher = False
        self._dropped = 0
        """Number of lost records in rank.json."""
        # A request for a copy interrupts the thinning of the log.
        self._budget = DiskBudget(rank_budget(session.world_size), lambda: not self._requested.is_set())
        self._thread = threading.Thread(
            target=guarded(_PART, self._run), name="ddpdoctor-writer", daemon=True
        )

    def start(self) -> None:
        """Start the thread, which claims a folder in the run directory. Raises OSError if that fails within ``START_S``; the thread
        then ends and the spool is removed."""
        self._thread.start()
        self._claimed.wait(START_S)
        if self._start_error is not None:
            self._abandoned = True
            discard(self._session.spool.directory)
            raise self._start_error

    def flush(self, deadline_s: float, ending: bool = False) -> bool:
        """Wait until everything recorded so far is in the run directory. Returns False if ``deadline_s``, monotonic, comes first.
        ``ending``: nothing more is recorded. After the copy, the spool is removed and the thread ends."""
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
            self._start_error = error
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
            # A failed write is retried, but at the same interval.
            changed_again = self.document_changed if copied else self._requested
            changed_again.wait(CHECK_PERIOD_S if self._copied_by_launcher else PERIOD_S)

    def _copy(self, changed: bool, ending: bool) -> bool:
        """Rewrite rank.json if it has changed, and copy the spool. Failures are counted and retried later; the spool keeps what was
        not copied. Raises BusyError if another process or thread is copying it."""
        session = self._session
        try:
            # For readers of the log if no status thread runs.
            session.recorder.write_brief_steps()
            dropped, self._dropped = self._dropped, session.spool.dropped
            if session.spool.restore() or changed or dropped != self._dropped:
                session.spool.keep_document(RANK_FILE, self._current_document())
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
            # Never switch off: space may be freed on a full disk, and a file server may recover.
            _PART.off = False
        except Exception:
            pass
