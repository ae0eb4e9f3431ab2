"""Builds the status of a rank as a document: the phase of a step, its stacks, its calls, and the exception that ends it."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

from ...rundir.stepevents import EventField, Phase
from ..job import place_of
from ..patching import UNCOUNTED_FILE
from ..profiling import Place, can_be_read, flight_recorder, stack_of
from ..recording import MOST_FRAMES_WRITTEN, Frame, Session, exception_document

ANY: frozenset[str] = frozenset()
"""All functions of a file."""
_PLACES: dict[str, tuple[tuple[frozenset[str], Phase], ...]] = {
    "torch/utils/data/dataloader.py": (
        (frozenset(["__next__", "__iter__", "__init__", "_reset"]), Phase.DATA),
    ),
    "torch/autograd/__init__.py": ((frozenset(["backward", "grad"]), Phase.BACKWARD),),
    "torch/autograd/graph.py": ((frozenset(["_engine_run_backward"]), Phase.BACKWARD),),
    "torch/nn/modules/module.py": (
        (frozenset(["_call_impl", "_wrapped_call_impl", "__call__"]), Phase.FORWARD),
    ),
    "torch/nn/parallel/distributed.py": (
        (frozenset(["forward", "_pre_forward", "_run_ddp_forward", "_post_forward"]), Phase.FORWARD),
        (ANY, Phase.COLLECTIVE),
    ),
    "torch/distributed/distributed_c10d.py": (
        (frozenset(["barrier", "monitored_barrier"]), Phase.BARRIER),
        (
            frozenset(
                ["init_process_group", "new_group", "_new_process_group_helper", "_store_based_barrier"]
            ),
            Phase.RENDEZVOUS,
        ),
        (ANY, Phase.COLLECTIVE),
    ),
    "torch/distributed/utils.py": (
        (frozenset(["_verify_param_shape_across_processes", "_sync_module_states"]), Phase.COLLECTIVE),
    ),
    "torch/distributed/rendezvous.py": ((ANY, Phase.RENDEZVOUS),),
    "torch/serialization.py": (
        (frozenset(["save", "_save", "_legacy_save"]), Phase.SAVE),
        (frozenset(["load", "_load", "_legacy_load"]), Phase.LOAD),
    ),
    "torch/distributed/checkpoint/state_dict_saver.py": ((ANY, Phase.SAVE),),
    "torch/distributed/checkpoint/state_dict_loader.py": ((ANY, Phase.LOAD),),
    "bdb.py": ((ANY, Phase.DEBUGGER),),
    "pdb.py": ((ANY, Phase.DEBUGGER),),
}
"""By end of a file's path: functions and the phase that they belong to. The first match counts."""
_FOLDERS = (
    ("/torch/optim/", Phase.OPTIMIZER),
    ("/debugpy/", Phase.DEBUGGER),
    ("/pydevd", Phase.DEBUGGER),
    ("/IPython/terminal/debugger", Phase.DEBUGGER),
)
_BY_NAME: dict[str, list[str]] = {place.rpartition("/")[2]: [] for place in _PLACES}
for _place in _PLACES:
    _BY_NAME[_place.rpartition("/")[2]].append(_place)


_COMPILING = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py")
"""Everything called from these files counts as compilation."""


def phase_of(frames: Sequence[Sequence[Any]]) -> Phase:
    """The phase of a stack of (file, line, function), innermost first: that of the innermost function that has one."""
    above = frames[1][0] if len(frames) > 1 else ""
    if frames and frames[0][0] == UNCOUNTED_FILE and not above.endswith("/distributed_c10d.py"):
        # The only wrapped function without Python frames inside is the wait for an asynchronous collective.
        return Phase.WAIT
    if any(file.endswith(_COMPILING) for file, _, _ in frames):
        return Phase.COMPILE
    for file, _, function in frames:
        found = _phase_of_frame(file, function)
        if found is not None:
            return found
    return Phase.OTHER


def _phase_of_frame(file: str, function: str) -> Phase | None:
    name = function.rpartition(".")[2]
    for place in _BY_NAME.get(file.rpartition("/")[2], ()):
        if file == place or file.endswith("/" + place):
            for functions, phase in _PLACES[place]:
                if not functions or name in functions:
                    return phase
    for folder, phase in _FOLDERS:
        if folder in file:
            return phase
    return None


_MOST_CHAINED = 6
"""Upper limit of the exceptions written: the last one raised and those that led to it."""

_ending: list[BaseException] = []
"""The exception known to end the process, from when it is caught until then."""


def set_fatal_exception(error: BaseException) -> None:
    """Note that ``error`` ends the process. Needed if it cannot be found at the end."""
    _ending[:] = [error]


def uncaught_exception() -> BaseException | None:
    """The exception that ends, or has ended, the main thread; None if there is none, or in an interactive session, which errors do
    not end."""
    if _ending:
        return _ending[0]
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not isinstance(error, BaseException) or hasattr(sys, "ps1"):
        return None
    # If it has frames above, C code called from Python printed it, and it ended no thread.
    trace = error.__traceback__
    return None if trace is not None and trace.tb_frame.f_back is not None else error


def exception_documents(error: BaseException) -> list[dict[str, Any]]:
    """Documents of the exception and of those that led to it, each with its relation to the previous one in the list."""
    found: list[dict[str, Any]] = []
    seen = set()
    relation: str | None = None
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(found) < _MOST_CHAINED:
        seen.add(id(current))
        document = exception_document(current, _frames(current))
        if relation is not None:
            document["relation"] = relation
        found.append(document)
        if current.__cause__ is not None:
            relation, current = "cause", current.__cause__
        else:
            relation, current = "context", None if current.__suppress_context__ else current.__context__
    return found


def _frames(error: BaseException) -> list[Frame]:
    """The frames of the exception's traceback, innermost first."""
    frames: list[Frame] = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(place_of(trace.tb_frame.f_code, trace.tb_lineno))
        trace = trace.tb_next
    return frames[::-1]


MOST_THREADS = 256
"""Upper limit of the threads whose stacks are written; with 64 frames each they take 2 MB."""
_MOST_CALL_LETTERS = 200
_EXHAUSTED = f"{EventField.EXHAUSTED.next_key}true"


class RankStatus:
    """Builds the status of the rank of one recording."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.errors: list[str] = []

    def counts(self, schema: str) -> dict[str, Any]:
        """The status without stacks."""
        recorder = self._session.recorder
        events = list(recorder.events)
        return {
            "schema": schema,
            "rank": self._session.rank,
            "world_size": self._session.world_size,
            "pid": os.getpid(),
            "at_ns": time.time_ns(),
            "step": recorder.step,
            "step_since_ns": recorder.start_perf_ns + recorder.epoch_offset_ns,
            "events": len(events),
            "evaluations": recorder.evaluations,
            "exhausted": any(_EXHAUSTED in fields for _, _, fields in events),
            "groups": self._try(group_numbers, {}),
        }

    def document(self, schema: str) -> dict[str, Any]:
        """The status with the training thread's phase and stack."""
        recorder = self._session.recorder
        places = stack_of(recorder.thread) if can_be_read() else []
        evaluating = self.evaluates()
        return {
            **self.counts(schema),
            "phase": _phase(places, evaluating).value,
            "evaluating": evaluating,
            "syscall": _system_call(),
            "frames": frames_of(places),
            "user": frames_of(recorder.kinds.user_items((place[0], place) for place in places)),
        }

    def phase(self) -> Phase | None:
        """The phase of a step that the training thread is in; None if stacks cannot be read in this Python."""
        if not can_be_read():
            return None
        return _phase(stack_of(self._session.recorder.thread), self.evaluates())

    def with_all_stacks(self, schema: str) -> dict[str, Any]:
        """The status with the stacks of all threads."""
        self.errors = []
        document = self.document(schema)
        document["threads"] = self._try(self._threads, [])
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
        listed = list(self._session.models.known.listed)
        alive = [model for model in (reference() for reference, _ in listed) if model is not None]
        return bool(alive) and not any(getattr(model, "training", True) for model in alive)

    def _threads(self) -> list[dict[str, Any]]:
        if not can_be_read():
            return []
        own = threading.get_ident()
        return [
            {
                "name": thread.name[:80],
                "training": thread.ident == self._session.recorder.thread,
                "frames": frames_of(stack_of(thread.ident)),
            }
            for thread in threading.enumerate()[:MOST_THREADS]
            if thread.ident is not None and thread.ident != own
        ]


def _system_call() -> str:
    """The system call of the process's first thread with its arguments, as in /proc; "" if it cannot be read. The kernel may hide it from
    other processes (Yama), but not from the process itself."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/syscall") as file:
            return file.read(_MOST_CALL_LETTERS).strip()
    except OSError:
        return ""


def _phase(places: Sequence[Place], evaluating: bool) -> Phase:
    phase = phase_of(frames_of(places, with_wrappers=True))
    return Phase.EVALUATION if evaluating and phase is Phase.FORWARD else phase


def frames_of(places: Sequence[Place], with_wrappers: bool = False) -> list[Frame]:
    """The frames as they are written, innermost first; without the hook's wrappers unless ``with_wrappers``."""
    written = (
        place_of(code, line) for code, line in places if with_wrappers or code.co_filename != UNCOUNTED_FILE
    )
    return list(islice(written, MOST_FRAMES_WRITTEN))


def group_numbers() -> dict[str, list[int]]:
    """By process group: numbers of collectives enqueued, started and completed, from the flight recorder."""
    data = flight_recorder(collectives=False)
    status = json.loads(data).get("pg_status") if data else None
    names = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
    return {
        str(group): [int(numbers.get(name, -1)) for name in names]
        for group, numbers in (status or {}).items()
    }


def unfinished_frames() -> dict[int, Any] | None:
    """The call stack of each collective that NCCL has not completed, by record id; None if torch does not report it. Not for Gloo:
    all collectives would be reported, at several ms each."""
    import pickle

    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    if dump is None:
        return None
    # Safe: written by this process just now, and made of plain containers.
    found = pickle.loads(dump(includeCollectives=True, includeStackTraces=True, onlyActive=True))
    return {entry["record_id"]: entry.get("frames") for entry in found.get("entries", [])}


def flight(session: Session) -> bytes | None:
    """The flight recorder's entries as JSON; None if this torch has no flight recorder."""
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
