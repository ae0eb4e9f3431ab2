"""DistributedDataParallel: its forwards, and the broadcast of its buffers before them."""

from __future__ import annotations

from threading import get_ident
from time import perf_counter_ns
from typing import Any, Optional, Tuple

from ...rundir import EventField, EventKind
from ..guard import part
from ..job import OpenForward, data_parallel_built, input_elements
from ..patching import Patches, around
from ..recording import Session, active, recording_here
from .forwards import FORWARD, leave

_PART = part("DistributedDataParallel")
_BROADCAST = EventKind.BROADCAST.opening + EventField.MODULE.next_key
_ELEMENTS = EventField.ELEMENTS.next_key

_Forward = Tuple[Session, Any, int, str]
"""The recording, the DDP module, the start, and the field with the size of the inputs."""
_TimedForward = Tuple[Session, Any, int, str, Optional[OpenForward]]
"""The same, and its entry among those in progress; None on another thread than the training thread."""


def _before_forward(args: Any, kwargs: Any) -> Optional[_Forward]:
    current = active.session
    if current is None:
        return None
    if current.recorder.thread != get_ident():
        return None if current.thread_is_known else (current, args[0], perf_counter_ns(), "")
    size = input_elements((*args[1:], *kwargs.values()))
    return current, args[0], perf_counter_ns(), f"{_ELEMENTS}{size}" if size else ""


def _before_data_parallel(args: Any, kwargs: Any) -> None:
    data_parallel_built.append(True)


def _before_timed_forward(args: Any, kwargs: Any) -> Optional[_TimedForward]:
    token = _before_forward(args, kwargs)
    if token is None:
        return None
    current, ddp, start, elements = token
    forward = None
    if current.recorder.thread == get_ident():
        forward = OpenForward(ddp, start, elements)
        current.models.open.append(forward)
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
            current.devices.gradients_follow(result)
    current.models.forward_ended(model, end)


def _is_grad_enabled() -> bool:
    """torch's function of this name, from the installation on."""
    return True


def _autocast() -> bool:
    """Whether autocast is on for any device, asked without the warning that is_autocast_cpu_enabled gives since 2.4."""
    import torch

    try:
        on_cpu = torch.is_autocast_enabled("cpu")
    except TypeError:
        on_cpu = torch.is_autocast_cpu_enabled()
    return bool(on_cpu or torch.is_autocast_enabled())


def _after_buffers(token: _Forward, result: Any) -> None:
    """Rank 0's buffers are broadcast before a forward: the others wait in it for rank 0."""
    current, ddp, start, _ = token
    recorder = current.recorder
    model = current.models.find(ddp, recorder.lines)
    if recording_here(recorder):
        recorder.add(start, perf_counter_ns() - start, f"{_BROADCAST}{model.index}")


def install(patches: Patches) -> None:
    """Wrap the part of DDP's forward that ``torch.compile`` leaves alone, and the broadcast before it."""
    import torch
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    global _is_grad_enabled
    _is_grad_enabled = torch.is_grad_enabled
    for name, before, after in (
        ("_sync_buffers", _before_forward, _after_buffers),
        ("_run_ddp_forward", _before_timed_forward, _after_timed_forward),
    ):
        original = getattr(DistributedDataParallel, name, None)
        if original is not None:
            patches.attribute(DistributedDataParallel, name, around(original, _PART, before, after, active))
    patches.attribute(DataParallel, "__init__", around(DataParallel.__init__, _PART, _before_data_parallel))
