"""Wrappers of garbage collections, constructors, the job's own profilers, and spawned processes."""

from __future__ import annotations

import gc
import importlib
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from ...rundir import EventKind
from .. import lifetime
from ..guard import part
from ..job import calling_frame, record_construction
from ..patching import Patches, around, guarded
from ..profiling import constructed
from ..recording import MOST_EVENTS, Recorder, active

SHORTEST_NS = 200_000
"""Shorter collections are too frequent to be recorded each, and cost little."""

_MOST_COLLECTIONS = MOST_EVENTS // 2
"""Collections of one step that are written each: building an index in Python collects hundreds of times, and the other
events of that step show when it was done."""
_COLLECTION = EventKind.COLLECTION.opening

_started = [0]
"""When the collection in progress began, perf_counter_ns; 0 outside of one."""
_in_step = [-1, 0]
"""The last step with a collection, and how many were recorded in it."""


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
            _add(recorder, duration)
        _started[0] = 0


def _add(recorder: Recorder, duration: int) -> None:
    if recorder.step != _in_step[0]:
        _in_step[:] = recorder.step, 0
    _in_step[1] += 1
    if _in_step[1] > _MOST_COLLECTIONS:
        recorder.count(duration)
        return
    # Where the collector runs of itself that is the line that happened to allocate; gc.collect() names itself.
    recorder.add(_started[0], duration, f"{_COLLECTION}{recorder.lines.caller()}")


def install_garbage(patches: Patches) -> None:
    """Register a callback for the garbage collections that stop the training thread."""
    callback = guarded(part("garbage collection"), _collecting, active)
    patches.add(lambda: gc.callbacks.append(callback), lambda: gc.callbacks.remove(callback))


def _before_module(args: Any, kwargs: Any) -> None:
    record_construction(args[0], None, calling_frame())


def _before_loader(args: Any, kwargs: Any) -> None:
    record_construction(args[0], kwargs.get("dataset", args[1] if len(args) > 1 else None), calling_frame())


def install_constructors(patches: Patches) -> None:
    """Wrap the constructors of data loaders and DDP modules, which subclasses call, for the line that built each."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    for owner, before in ((DistributedDataParallel, _before_module), (DataLoader, _before_loader)):
        patches.attribute(owner, "__init__", around(owner.__init__, part("constructors"), before))


_PROFILERS = {
    "torch.profiler.profiler": ("_KinetoProfile",),
    "torch.autograd.profiler": ("profile", "emit_nvtx", "emit_itt"),
}


def _before_profiler(args: Any, kwargs: Any) -> None:
    constructed(args[0])


def install_profilers(patches: Patches) -> None:
    """Watch the constructors of torch's profilers: whether the job profiles itself."""
    for module_name, names in _PROFILERS.items():
        module = importlib.import_module(module_name)
        for name in names:
            owner = vars(module).get(name)
            if owner is not None:
                patches.attribute(
                    owner,
                    "__init__",
                    around(owner.__init__, part("detection of other profilers"), _before_profiler),
                )


def _caught(raised: BaseException) -> None:
    if isinstance(raised, SystemExit) and isinstance(raised.__context__, Exception):
        lifetime.write_end_status(raised.__context__)


def install_spawned(patches: Patches) -> None:
    """Wrap what runs in a process that ``torch.multiprocessing.spawn`` starts, which finds it by its name: it catches the exception of such
    a one, hands its text to the parent and ends the process at once, so that nothing registered for the exit is run."""
    spawn = importlib.import_module("torch.multiprocessing.spawn")  # the package has a function of that name
    patches.attribute(
        spawn, "_wrap", around(spawn._wrap, part("exceptions of spawned processes"), failed=_caught)
    )
