"""Wraps DistributedDataParallel's forwards, and the broadcast of its buffers before them.

If backwards and optimizer steps run inside a forward, the forward is recorded in parts, one before each backward. ``interrupt``,
``pause``, ``resume`` and ``leave`` do that, on the training thread only.
"""

from __future__ import annotations

from threading import get_ident
from time import perf_counter_ns
from typing import Any, Optional

from ...rundir.stepevents import EventField, EventKind, Phase
from ..guard import part
from ..job import OpenForward, data_parallel_built, group_name, input_elements
from ..patching import Patches, around
from ..recording import Session, active, exception_recorder, recording_here

_PART = part("DistributedDataParallel")
_BROADCAST = EventKind.BROADCAST.opening + EventField.MODULE.next_key
_BROADCASTING = EventKind.BROADCAST.opening + EventField.GROUP.next_key
_ELEMENTS = EventField.ELEMENTS.next_key

_Buffers = tuple[Session, Any, int, int]
"""The session, the DDP module, the start, and the index of the call in the calls page."""
_TimedForward = tuple[Session, Any, int, str, Optional[OpenForward]]
"""The session, the DDP module, the start, the field with the size of the inputs, and the open forward, which is None unless this is
the training thread."""


def _before_data_parallel(args: Any, kwargs: Any) -> None:
    data_parallel_built[:] = [True]


def _before_timed_forward(args: Any, kwargs: Any) -> _TimedForward | None:
    current, ddp, elements, forward = active.session, args[0], "", None
    if current is None:
        return None
    if current.recorder.thread == get_ident():
        size = input_elements((*args[1:], *kwargs.values()))
        elements = f"{_ELEMENTS}{size}" if size else ""
        start = perf_counter_ns()
        forward = OpenForward(ddp, start, elements)
        current.models.open.append(forward)
    elif current.thread_is_known:
        return None
    else:
        start = perf_counter_ns()
    if current.devices is not None and current.devices.timing and _is_grad_enabled():
        current.devices.mark("fwd")
    return current, ddp, start, elements, forward


def _after_timed_forward(token: _TimedForward, result: Any) -> None:
    current, ddp, start, elements, forward = token
    end = perf_counter_ns()
    recorder = current.recorder
    begin = start if forward is None else leave(current, forward, start)
    if begin is None:
        return
    if not _is_grad_enabled():
        if recording_here(recorder):
            recorder.add_evaluation(begin, end - begin)
        return
    model = current.models.find(ddp, recorder.lines)
    if model.autocast is None:
        model.autocast = _autocast()
    if recording_here(recorder):
        recorder.add(begin, end - begin, f"{FORWARD}{model.index}{elements}")
    model.reduces = getattr(ddp, "require_backward_grad_sync", True)
    if current.devices is not None and current.devices.timing:
        current.devices.mark("fwd_end")
        if model.reduces:
            current.devices.hook_gradient_end(result)
    current.models.note_forward_end(model, end)


def _is_grad_enabled() -> bool:
    """Placeholder; ``install`` sets torch's function."""
    return True


def _autocast() -> bool:
    """Whether autocast is enabled for any device. Avoids is_autocast_cpu_enabled where possible: it warns since torch 2.4."""
    import torch

    try:
        on_cpu = torch.is_autocast_enabled("cpu")
    except TypeError:
        on_cpu = torch.is_autocast_cpu_enabled()
    return bool(on_cpu or torch.is_autocast_enabled())


def _before_buffers(args: Any, kwargs: Any) -> _Buffers | None:
    """Record the start of the broadcast of rank 0's buffers before a forward, in which the other ranks wait for rank 0. Written in
    every step, like a collective."""
    current = active.session
    if current is None or current.recorder.thread != get_ident():
        return None
    ddp, recorder = args[0], current.recorder
    group = group_name(getattr(ddp, "process_group", None))
    fields = f'{_BROADCASTING}"{group}"{recorder.lines.caller()}'
    recorder.flush_definitions()
    place = recorder.calls.begin(recorder.calls.recurring(fields, group), recorder.step, by_ddp=True)
    return current, ddp, perf_counter_ns(), place


def _after_buffers(token: _Buffers, result: Any) -> None:
    current, ddp, start, place = token
    recorder = current.recorder
    if not isinstance(result, BaseException):
        recorder.calls.end(place)
    if recording_here(recorder):
        model = current.models.find(ddp, recorder.lines)
        recorder.add(start, perf_counter_ns() - start, f"{_BROADCAST}{model.index}")


FORWARD = EventKind.FORWARD.opening + EventField.MODULE.next_key
"""Beginning of a forward event's fields. The module's number and the size of the inputs follow."""


def interrupt(current: Session, at: int, loss: Any) -> None:
    """Handle a backward of ``loss`` that begins at ``at``, perf_counter_ns, inside the innermost open forward."""
    forward, recorder = current.models.open[-1], current.recorder
    model = current.models.find(forward.ddp, recorder.lines)
    since, forward.since, forward.interrupted = forward.since, None, True
    devices = current.devices if current.devices is not None and current.devices.timing else None
    if since is not None:
        if recording_here(recorder):
            recorder.add(since, at - since, f"{FORWARD}{model.index}{forward.elements}")
        if devices is not None:
            devices.mark("fwd_end")
    if model.forward_end is None:
        # A backward called here belongs to a forward that prepares DDP directly before it.
        current.models.note_forward_end(model, at)
        model.reduces = getattr(forward.ddp, "require_backward_grad_sync", True)
    if devices is not None and model.reduces:
        devices.hook_gradient_end(loss)


def pause(current: Session) -> None:
    """Handle an optimizer step that is about to begin inside the innermost open forward: no backward followed what ran since the
    last one."""
    forward = current.models.open[-1]
    if forward.interrupted and forward.since is not None:
        forward.since = None
        if current.devices is not None:
            current.devices.unmark("fwd")


def resume(current: Session, at: int) -> None:
    """Handle the end of a backward or optimizer step inside the innermost open forward: another backward may follow."""
    forward = current.models.open[-1]
    if forward.since is None:
        forward.since = at
        if current.devices is not None and current.devices.timing:
            current.devices.mark("fwd")


def leave(current: Session, forward: OpenForward, start: int) -> int | None:
    """End a forward that began at ``start``. Returns the start of its event; None if it has none. Both are perf_counter_ns."""
    # Inner forwards that were left by an exception may still be in the list.
    opened = current.models.open
    del opened[opened.index(forward) if forward in opened else len(opened) :]
    if not forward.interrupted:
        return start
    if not getattr(forward.ddp, "require_backward_grad_sync", True):
        # Its backward ran inside; the rest of the forward belongs to no backward.
        current.models.find(forward.ddp, current.recorder.lines).forward_end = None
        if forward.since is not None and current.devices is not None:
            current.devices.unmark("fwd")
        return None
    return start if forward.since is None else max(forward.since, current.recorder.start_perf_ns)


def install(patches: Patches) -> None:
    """Wrap the part of DDP's forward that ``torch.compile`` does not compile, and the broadcast before it."""
    import torch
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    global _is_grad_enabled
    _is_grad_enabled = torch.is_grad_enabled
    original = getattr(DistributedDataParallel, "_sync_buffers", None)
    if original is not None:
        failed = exception_recorder(Phase.COLLECTIVE)
        wrapped = around(original, _PART, _before_buffers, _after_buffers, failed=failed)
        patches.attribute(DistributedDataParallel, "_sync_buffers", wrapped)
    original = getattr(DistributedDataParallel, "_run_ddp_forward", None)
    if original is not None:
        wrapped = around(original, _PART, _before_timed_forward, _after_timed_forward, active)
        patches.attribute(DistributedDataParallel, "_run_ddp_forward", wrapped)
    patches.attribute(DataParallel, "__init__", around(DataParallel.__init__, _PART, _before_data_parallel))
