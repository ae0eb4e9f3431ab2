"""Backward passes, and when each of DDP's buckets was ready in them."""

from __future__ import annotations

from threading import get_ident
from time import perf_counter_ns
from typing import Any, Optional, Tuple

from ...rundir import EventKind, Phase
from ..guard import part
from ..patching import Patches, around
from ..recording import Session, active, backwards, raising_in, recording_here
from . import forwards, optimizers

_PART = part("backward passes")
_BACKWARD = EventKind.BACKWARD.opening

_Token = Tuple[Session, int, str]
"""The recording, the start, and the field with the source line."""


def _before(args: Any, kwargs: Any) -> Optional[_Token]:
    current = active.session
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
            forwards.interrupt(current, perf_counter_ns(), args[0] if args else kwargs.get("tensors"))
        if current.devices is not None and current.devices.timing:
            current.devices.mark("bwd")
    return current, perf_counter_ns(), where


def _after(token: _Token, result: Any) -> None:
    current, start, where = token
    end = perf_counter_ns()
    backward = current.backward
    backward.depth -= 1
    if backward.depth or current is not active.session:
        return
    if optimizers.open_step.depth:
        # It may have run in the optimizer's closure.
        optimizers.open_step.nested_end = end
    recorder = current.recorder
    if current.devices is not None and current.devices.timing:
        current.devices.mark("bwd_end")
    if recording_here(recorder):
        fields = current.models.after_backward(recorder.start_perf_ns, recorder.full_since)
        recorder.add(start, end - start, f"{_BACKWARD}{where}{fields}")
    if current.models.open:
        forwards.resume(current, end)
    if backward.steps_optimizer and not isinstance(result, BaseException):
        optimizers.end_of_stepping_backward(current, end)


def install(patches: Patches) -> None:
    """Replace ``torch.autograd.backward``, which ``Tensor.backward`` looks up at each call."""
    import torch

    wrapper = around(torch.autograd.backward, _PART, _before, _after, backwards, raising_in(Phase.BACKWARD))
    patches.attribute(torch.autograd, "backward", wrapper)
