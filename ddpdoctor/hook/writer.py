"""The thread that carries what was recorded to the run directory, however slow that is."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Dict

from ..rundir import RANK_FILE, drain, reason_of, write_json
from . import guard
from .patching import guarded

if TYPE_CHECKING:
    from .session import Session

PERIOD_S = 1.0
_PART = guard.part("run directory")


class Writer:
    """Drains the spool and rewrites rank.json when it has changed."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.document_changed = threading.Event()
        self._thread = threading.Thread(
            target=guarded(_PART, self._run), name="ddpdoctor-writer", daemon=True
        )

    def start(self) -> None:
        """Start the thread; the first thing it writes is rank.json."""
        self.document_changed.set()
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.write_everything(only_if_changed=True)
            if self.document_changed.wait(PERIOD_S):
                # One that cannot be written stays changed: no faster than the rest.
                self._stop.wait(PERIOD_S if _PART.errors else 0)

    def write_everything(self, only_if_changed: bool = False) -> None:
        """Drain, and write rank.json. A failure is counted, and tried again later: the spool keeps what was
        not copied.
        """
        try:
            with self._lock:
                drain(self._session.spool.directory)
                if self.document_changed.is_set() or not only_if_changed:
                    self.document_changed.clear()
                    path = os.path.join(self._session.directory, RANK_FILE)
                    write_json(path, self._current_document())
        except Exception as error:
            self.document_changed.set()
            self._failed(error)
            self._keep_document()

    def _keep_document(self) -> None:
        try:
            with self._lock:
                self._session.spool.keep(RANK_FILE, self._current_document())
        except Exception as error:
            self._failed(error)

    def _current_document(self) -> Dict[str, Any]:
        session = self._session
        recorder = session.recorder
        session.document["hook"] = {
            "self_us_per_step": recorder.thinning.cost_us,
            "thinned": recorder.thinning.every,
            "dropped": session.spool.dropped,
            "errors": list(guard.errors) + ([session.spool.error] if session.spool.error else []),
        }
        return session.document

    def stop(self) -> None:
        """End the thread; the spool, copied, is removed."""
        self._stop.set()
        self.document_changed.set()
        self._thread.join(timeout=5)
        try:
            with self._lock:
                self._session.spool.close()
                drain(self._session.spool.directory, remove=True)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        try:
            words = told = ""
            if isinstance(error, OSError):
                session = self._session
                words = f"{session.directory} could not be written ({reason_of(error)})."
                told = (
                    f"what rank {session.rank} records cannot be written to {session.run} ({reason_of(error)}); "
                    "it waits in memory, and the job goes on."
                )
            _PART.failed(error, words, told)
            # A full disk may be emptied, a file server may come back: this part never gives up.
            _PART.off = False
        except Exception:
            pass
