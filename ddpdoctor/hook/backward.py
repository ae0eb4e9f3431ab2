"""Backward passes, and when each of DDP's buckets was ready in them."""

from __future__ import annotations

from threading import get_ident
from time import perf_counter_ns
from typing import Any, Optional, Tuple

from . import optimizers, session
from .guard import part
from .patching import Patches, around
from .recorder import recording_here
from .state import active, backwards

_PART = part("backward passes")


class Backward:
    """The backward in progress, outermost, on the training thread."""

    __slots__ = ("depth", "steps_optimizer")

    def __init__(self) -> None:
        self.depth = 0
        self.steps_optimizer = False


def _before(args: Any, kwargs: Any) -> Optional[Tuple["session.Session", int, str]]:
    current = session.current
    if current is None:
        return None
    recorder, backward = current.recorder, current.backward
    if recorder.thread != get_ident():
        if current.thread_is_known:
            return None
        where = ""
    else:
        where = recorder.lines.caller() if active.full and not backward.depth else ""
    backward.depth += 1
    if backward.depth == 1:
        backward.steps_optimizer = False
        if current.models.open and recorder.thread == get_ident():
            current.models.interrupt(current, perf_counter_ns(), args[0] if args else kwargs.get("tensors"))
        if current.devices is not None and current.devices.timing:
            current.devices.mark("bwd")
    return current, perf_counter_ns(), where


def _after(token: Tuple["session.Session", int, str], result: Any) -> None:
    current, start, where = token
    end = perf_counter_ns()
    backward = current.backward
    backward.depth -= 1
    if backward.depth or current is not session.current:
        return
    if optimizers.open_step.depth:
        # It may have run in the optimizer's closure.
        optimizers.open_step.nested_end = end
    recorder = current.recorder
    if current.devices is not None and current.devices.timing:
        current.devices.mark("bwd_end")
    if recording_here(recorder):
        fields = current.models.after_backward(recorder.start_perf_ns, recorder.full_since)
        recorder.add(start, end - start, f'"k":"bwd"{where}{fields}')
    if current.models.open:
        current.models.resume(current, end)
    if backward.steps_optimizer and not isinstance(result, BaseException):
        optimizers.end_of_stepping_backward(current, end)


def install(patches: Patches) -> None:
    """Replace ``torch.autograd.backward``, which ``Tensor.backward`` looks up at each call."""
    import torch

    wrapper = around(torch.autograd.backward, _PART, _before, _after, backwards)
    patches.attribute(torch.autograd, "backward", wrapper)
