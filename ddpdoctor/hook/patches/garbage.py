"""Garbage collections that stop the training thread."""

from __future__ import annotations

import gc
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from ...rundir import EventKind
from ..guard import part
from ..patching import Patches, guarded
from ..recording import active

SHORTEST_NS = 200_000
"""Shorter collections are too frequent to be recorded each, and cost little."""

_COLLECTION = EventKind.COLLECTION.opening

_started = [0]
"""When the collection in progress began, perf_counter_ns; 0 outside of one."""


def _collecting(phase: str, info: dict[str, Any]) -> None:
    recorder = active.recorder
    if recorder is None or recorder.thread != get_ident():
        return
    now = perf_counter_ns()
    if phase == "start":
        _started[0] = now
    elif _started[0]:
        duration = now - _started[0]
        if duration >= SHORTEST_NS:
            # Where the collector runs of itself that is the line that happened to allocate; gc.collect() names itself.
            where = recorder.lines.caller()
            recorder.add(_started[0], duration, f"{_COLLECTION}{where}")
        _started[0] = 0


def install(patches: Patches) -> None:
    """Ask the collector to call us."""
    callback = guarded(part("garbage collection"), _collecting, active)
    patches.add(lambda: gc.callbacks.append(callback), lambda: gc.callbacks.remove(callback))
