"""Wraps process groups, garbage collections, constructors, the job's own profilers, spawned processes, and checkpoints.

A recording begins in ``init_process_group``. Before ``destroy_process_group`` everything is copied to disk, because Gloo sometimes
aborts the process in it, and then no exit handler runs. Checkpoints are recorded in all steps, even in those of which only the
times are kept: they are rare, and the work since the last one is repeated after a restart.
"""

from __future__ import annotations

import gc
import importlib
import time
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from ...rundir.stepevents import EventKind
from .. import finder, lifetime
from ..guard import part
from ..job import calling_frame, record_construction
from ..patching import After, Before, Patches, around, cell_of, guarded, torch_patches
from ..profiling import note_user_profiler
from ..recording import MOST_EVENTS, Recorder, active
from ..stalls import note_join_started

_PROCESS_GROUPS = part("arming")


def _before_init(args: Any, kwargs: Any) -> int:
    note_join_started()
    recorder = active.recorder
    if recorder is not None:
        recorder.heartbeat.reopen()  # the process trains several times, with a process group for each
    return time.time_ns()


def _after_init(joining_ns: int, result: Any) -> None:
    import torch.distributed as dist

    if isinstance(result, BaseException) or not dist.is_initialized():
        return
    lifetime.arm(dist.get_rank(), dist.get_world_size(), joining_ns)


def _before_destroy(args: Any, kwargs: Any) -> bool | None:
    recorder = active.recorder
    if recorder is not None:
        recorder.calls.known.clear()  # keyed by the id of the process group, which may be reused
    group = args[0] if args else kwargs.get("group")
    import torch.distributed as dist

    if group is None or group is dist.group.WORLD:
        lifetime.flush()
        if recorder is not None and recorder.thread == get_ident():
            recorder.record_new_training()
    return None


def install_process_groups(patches: Patches) -> None:
    """Wrap ``init_process_group`` and ``destroy_process_group``."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    cell = cell_of(c10d.init_process_group)
    if cell is not None:
        patches.cell(cell, around(cell.cell_contents, _PROCESS_GROUPS, _before_init, _after_init))
    else:
        wrapped = around(c10d.init_process_group, _PROCESS_GROUPS, _before_init, _after_init)
        for module in (dist, c10d):
            patches.attribute(module, "init_process_group", wrapped)
    wrapped = around(c10d.destroy_process_group, _PROCESS_GROUPS, _before_destroy)
    for module in (dist, c10d):
        patches.attribute(module, "destroy_process_group", wrapped)
    lifetime.watch_process()


SHORTEST_NS = 200_000
"""Shorter collections are not recorded: they are frequent and cost little."""

_MOST_COLLECTIONS = MOST_EVENTS // 2
"""Upper limit of the collections written per step. Building an index in Python collects hundreds of times, and the other events of
that step show when that happened."""
_COLLECTION = EventKind.COLLECTION.opening

_started = [0]
"""Start of the collection in progress, perf_counter_ns; 0 if there is none."""
_in_step = [-1, 0]
"""The last step with a collection, and the number recorded in it."""


def _on_collection(phase: str, info: dict[str, Any]) -> None:
    recorder = active.recorder
    if recorder is None or recorder.thread != get_ident():
        return
    now = perf_counter_ns()
    if phase == "start":
        _started[0] = now
    elif _started[0]:
        duration = now - _started[0]
        if duration >= SHORTEST_NS:
            _add_collection(recorder, duration)
        _started[0] = 0


def _add_collection(recorder: Recorder, duration: int) -> None:
    if recorder.step != _in_step[0]:
        _in_step[:] = recorder.step, 0
    _in_step[1] += 1
    if _in_step[1] > _MOST_COLLECTIONS:
        recorder.count(duration)
        return
    # For an automatic collection, this is the line that happened to allocate; for gc.collect(), the line of the call.
    recorder.add(_started[0], duration, f"{_COLLECTION}{recorder.lines.caller()}")


def install_garbage(patches: Patches) -> None:
    """Register a callback for the garbage collections that stop the training thread."""
    callback = guarded(part("garbage collection"), _on_collection, active)
    patches.add(lambda: gc.callbacks.append(callback), lambda: gc.callbacks.remove(callback))


def _before_module(args: Any, kwargs: Any) -> None:
    record_construction(args[0], None, calling_frame())


def _before_loader(args: Any, kwargs: Any) -> None:
    record_construction(args[0], kwargs.get("dataset", args[1] if len(args) > 1 else None), calling_frame())


def install_constructors(patches: Patches) -> None:
    """Wrap the constructors of data loaders and DDP modules, which subclasses call, to find the line that constructed each."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    for owner, before in ((DistributedDataParallel, _before_module), (DataLoader, _before_loader)):
        patches.attribute(owner, "__init__", around(owner.__init__, part("constructors"), before))


_PROFILERS = {
    "torch.profiler.profiler": ("_KinetoProfile",),
    "torch.autograd.profiler": ("profile", "emit_nvtx", "emit_itt"),
}


def _before_profiler(args: Any, kwargs: Any) -> None:
    note_user_profiler(args[0])


def install_profilers(patches: Patches) -> None:
    """Wrap the constructors of torch's profilers, to detect that the job profiles itself."""
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


def _on_spawned_exit(raised: BaseException) -> None:
    if isinstance(raised, SystemExit) and isinstance(raised.__context__, Exception):
        lifetime.write_end_status(raised.__context__)


def install_spawned(patches: Patches) -> None:
    """Wrap the function that runs in a process started by ``torch.multiprocessing.spawn``, which finds it by its name. That
    function catches the exception of the process, sends its text to the parent and exits at once, without exit handlers."""
    spawn = importlib.import_module("torch.multiprocessing.spawn")  # the package has a function of that name
    patches.attribute(
        spawn, "_wrap", around(spawn._wrap, part("exceptions of spawned processes"), failed=_on_spawned_exit)
    )


_CHECKPOINTS = part("checkpoints")
_DISTRIBUTED = {
    "torch.distributed.checkpoint.state_dict_saver": (
        EventKind.SAVE,
        ("save", "async_save", "save_state_dict"),
    ),
    "torch.distributed.checkpoint.state_dict_loader": (EventKind.LOAD, ("load", "load_state_dict")),
}

_Token = tuple[int, str]
"""The start (perf_counter_ns) and the fields of the event."""

_depth = [0]
"""Nesting depth of these functions."""


def checkpoint_event(kind: EventKind) -> tuple[Before, After]:
    opening = kind.opening

    def before(args: Any, kwargs: Any) -> _Token | None:
        recorder = active.recorder
        if recorder is None or recorder.thread != get_ident():
            return None
        token = perf_counter_ns(), opening + recorder.lines.caller(through=True)
        # Set last: an exception from a signal handler of the job must not leave it set.
        _depth[0] += 1
        return token

    def after(token: _Token, result: Any) -> None:
        end = perf_counter_ns()
        _depth[0] = max(0, _depth[0] - 1)
        recorder = active.recorder
        # If it raised, there is no checkpoint, or none was read: do not record it.
        if recorder is not None and not _depth[0] and not isinstance(result, BaseException):
            recorder.add(token[0], end - token[0], token[1])
            if kind is EventKind.SAVE:
                recorder.note_saved()

    return before, after


def install_checkpoints(patches: Patches) -> None:
    """Wrap ``torch.save`` and ``torch.load``, and the functions of ``torch.distributed.checkpoint`` when the job imports it."""
    import torch

    lifetime.at_fork.append(lambda: _depth.__setitem__(0, 0))
    for kind, name in ((EventKind.SAVE, "save"), (EventKind.LOAD, "load")):
        original = getattr(torch, name)
        timed = around(original, _CHECKPOINTS, *checkpoint_event(kind))
        for module in (torch, torch.serialization):
            if vars(module).get(name) is original:
                patches.attribute(module, name, timed)
    for module_name in _DISTRIBUTED:
        finder.after_import(module_name, __name__, "install_distributed")


def install_distributed() -> None:
    """Wrap the imported functions of ``torch.distributed.checkpoint``."""
    import sys

    for module_name, (kind, names) in _DISTRIBUTED.items():
        module = sys.modules.get(module_name)
        for name in names:
            original = vars(module).get(name) if module is not None else None
            if original is not None and not hasattr(original, "_torchdynamo_disable"):
                torch_patches.attribute(module, name, around(original, _CHECKPOINTS, *checkpoint_event(kind)))
