"""Where a rank is: in which step and phase, on which lines, which collectives it has called. Read from beside, by any thread."""

from __future__ import annotations

import json
import os
import threading
import time
from itertools import islice
from typing import Any, Dict, List, Optional, Sequence

from ...rundir import EventField, EventKind, Phase
from ..job import Kinds
from ..patching import UNCOUNTED_FILE
from ..profiling import Place, can_be_read, flight_recorder, stack_of
from ..recording import Session
from .phases import phase_of

Frame = List[Any]
"""File, line, function."""
MOST_TOLD = 64
"""Frames of a stack that are written down: a trainer's own loop, with torch below it, has 30 to 50."""
MOST_THREADS = 256
"""Threads whose stacks are written down: 64 frames of each are 2 MB."""
_MOST_LAST = 16
"""Collectives of the step that are named: those before it are in the flight recorder, or in the log."""
_CALLS = tuple(kind.opening for kind in (EventKind.COLLECTIVE, EventKind.BARRIER, EventKind.WAIT))
_EXHAUSTED = f"{EventField.EXHAUSTED.next_key}true"


class Whereabouts:
    """Of one recording."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._kinds = Kinds()
        """Our own: that of the training thread is no other thread's to change."""
        self.errors: List[str] = []

    def counts(self, schema: str) -> Dict[str, Any]:
        """What can be told without a stack."""
        recorder = self._session.recorder
        events = list(recorder.events)
        return {
            "schema": schema,
            "rank": self._session.rank,
            "world_size": self._session.world_size,
            "pid": os.getpid(),
            "at_ns": time.time_ns(),
            "step": recorder.step,
            "step_since_ns": recorder.start_perf_ns + recorder.epoch_of_zero,
            "events": len(events),
            "evaluations": recorder.evaluations,
            "exhausted": any(_EXHAUSTED in fields for _, _, fields in events),
            "groups": self._try(group_numbers, {}),
        }

    def document(self, schema: str) -> Dict[str, Any]:
        """The same, with where the training thread is."""
        places = stack_of(self._session.recorder.thread) if can_be_read() else []
        evaluating = self.evaluates()
        return {
            **self.counts(schema),
            "phase": _phase(places, evaluating).value,
            "evaluating": evaluating,
            "frames": frames_of(places),
            "user": frames_of(self._kinds.of_user((place[0], place) for place in places)),
        }

    def phase(self) -> Optional[Phase]:
        """In which phase of a step the training thread is; None where this Python's stacks cannot be read."""
        if not can_be_read():
            return None
        return _phase(stack_of(self._session.recorder.thread), self.evaluates())

    def standing(self, schema: str) -> Dict[str, Any]:
        """All of it, with the stacks of all threads."""
        self.errors = []
        document = self.document(schema)
        document["threads"] = self._try(self._threads, [])
        document["last"] = self._try(self._last_calls, [])
        document["loaders"] = self._try(self._loaders, [])
        document["errors"] = self.errors
        return document

    def _try(self, read: Any, otherwise: Any) -> Any:
        try:
            return read()
        except Exception as error:
            self.errors.append(f"{read.__name__.strip('_')}: {type(error).__name__}: {error}"[:300])
            return otherwise

    def evaluates(self) -> bool:
        """Whether all models of the job are in evaluation mode."""
        listed = islice(list(self._session.models.known.listed), MOST_THREADS)
        alive = [model for model in (reference() for reference, _ in listed) if model is not None]
        return bool(alive) and not any(getattr(model, "training", True) for model in alive)

    def _threads(self) -> List[Dict[str, Any]]:
        if not can_be_read():
            return []
        own = threading.get_ident()
        return [
            {
                "name": thread.name[:80],
                "native_id": thread.native_id,
                "daemon": thread.daemon,
                "training": thread.ident == self._session.recorder.thread,
                "frames": frames_of(stack_of(thread.ident)),
            }
            for thread in threading.enumerate()[:MOST_THREADS]
            if thread.ident is not None and thread.ident != own
        ]

    def _last_calls(self) -> List[Dict[str, Any]]:
        recorder = self._session.recorder
        calls = [event for event in list(recorder.events) if event[2].startswith(_CALLS)]
        found = []
        for start, duration, fields in calls[-_MOST_LAST:]:
            event = json.loads(f"{{{fields}}}")
            found.append(
                {
                    "kind": event.get(EventField.KIND.value),
                    "operation": event.get(EventField.OPERATION.value),
                    "group": event.get(EventField.GROUP.value),
                    "bytes": event.get(EventField.MESSAGE_BYTES.value),
                    "end_ns": start + duration + recorder.epoch_of_zero,
                }
            )
        return found

    def _loaders(self) -> List[Dict[str, Any]]:
        return [
            {
                "loader": number,
                "workers": [worker.pid for worker in getattr(iterator, "_workers", ()) if worker.pid],
                "outstanding": getattr(iterator, "_tasks_outstanding", None),
            }
            for iterator, number in self._session.loaders.iterators()
        ]


def _phase(places: Sequence[Place], evaluating: bool) -> Phase:
    phase = phase_of(frames_of(places, ours=True))
    return Phase.EVALUATION if evaluating and phase is Phase.FORWARD else phase


def frames_of(places: Sequence[Place], ours: bool = False) -> List[Frame]:
    """Frames, innermost first, as they are written down; without the line of a wrapper of ours unless ``ours``."""
    told = (
        [
            code.co_filename if code.co_filename.startswith("<") else os.path.abspath(code.co_filename),
            line,
            getattr(code, "co_qualname", code.co_name),
        ]
        for code, line in places
        if ours or code.co_filename != UNCOUNTED_FILE
    )
    return list(islice(told, MOST_TOLD))


def group_numbers() -> Dict[str, List[int]]:
    """By process group: how many collectives were enqueued, started and completed, as the flight recorder counts them."""
    data = flight_recorder(collectives=False)
    status = json.loads(data).get("pg_status") if data else None
    names = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
    return {
        str(group): [int(numbers.get(name, -1)) for name in names]
        for group, numbers in (status or {}).items()
    }


def unfinished_frames() -> "Optional[Dict[int, Any]]":
    """Where each collective was called from that NCCL has not completed, by the number of its record; None where torch does not
    tell. Of Gloo's it would tell those of all, at several ms each."""
    import pickle

    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    if dump is None:
        return None
    # Made in this process a moment ago, of plain containers.
    found = pickle.loads(dump(includeCollectives=True, includeStackTraces=True, onlyActive=True))
    return {entry["record_id"]: entry.get("frames") for entry in found.get("entries", [])}


def flight(session: Session) -> Optional[bytes]:
    """The flight recorder's entries as JSON; None where this torch keeps none."""
    data = flight_recorder()
    if data is None or session.document.get("backend") != "nccl":
        return data
    try:
        known = unfinished_frames() or {}
        document = json.loads(data)
        for entry in document.get("entries", []):
            if known.get(entry.get("record_id")):
                entry["frames"] = known[entry["record_id"]]
        return json.dumps(document, separators=(",", ":")).encode()
    except Exception:
        return data
