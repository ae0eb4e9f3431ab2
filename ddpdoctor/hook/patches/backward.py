"""Backward passes, and when each of DDP's buckets was ready in them."""

from __future__ import annotations

import sys
import weakref
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any

from ...rundir import EventField, EventKind, Phase
from ..guard import part
from ..patching import Patches, around
from ..recording import MOST_PLACES, Call, Session, active, backwards, exception_recorder, recording_here
from . import ddp, optimizers

_PART = part("backward passes")
_BACKWARD = EventKind.BACKWARD.opening
_REDUCING = EventKind.BACKWARD.opening + EventField.GROUP.next_key

_Token = tuple[Session, int, str, int]
"""The recording, the start, 0 in steps of which only the times are kept, the field with the source line, and where the call was
written down."""


class Usual:
    """The backward that was called last; usually the next one is called from the same line and reduces the same
    model."""

    __slots__ = ("above", "above_at", "at", "call", "code", "model")

    def __init__(self, frame: FrameType, above: FrameType, call: Call, model: weakref.ref[Any]) -> None:
        self.code, self.at, self.above, self.above_at = (
            frame.f_code,
            frame.f_lasti,
            above.f_code,
            above.f_lasti,
        )
        self.call, self.model = call, model


def _before(args: Any, kwargs: Any) -> _Token | int | None:
    current = active.session
    if current is None:
        return None
    recorder, backward = current.recorder, current.backward
    here = recorder.thread == get_ident()
    if backwards.full or backward.depth:
        return _before_in_full(current, here, args[0] if args else kwargs.get("tensors"))
    if not here:
        return None
    # In every step, so in as few operations as can be.
    frame = sys._getframe(2)
    above = frame.f_back or frame
    usual = backward.usual
    if (
        usual is not None
        and usual.code is frame.f_code
        and usual.at == frame.f_lasti
        and usual.above is above.f_code
        and usual.above_at == above.f_lasti
        and getattr(usual.model(), "require_backward_grad_sync", False)
    ):
        place = recorder.calls.begin_own(usual.call, recorder.step)
    else:
        place = _begin_reduction(current, frame, above)[1]
    # Last: it would stay raised where a handler of the job's raised before this.
    backward.depth = 1
    return place


def _before_in_full(current: Session, here: bool, loss: Any) -> _Token | None:
    if not here and (current.thread_is_known or not backwards.full):
        return None
    where, place, backward = "", -1, current.backward
    if not backward.depth:
        if here:
            frame = sys._getframe(3)
            where, place = _begin_reduction(current, frame, frame.f_back or frame)
        if backwards.full:
            _look(current, here, loss)
    start = perf_counter_ns() if backwards.full else 0
    backward.depth += 1
    return current, start, where, place


def _begin_reduction(current: Session, frame: FrameType, above: FrameType) -> tuple[str, int]:
    """The field with the source line. A backward in which DDP reduces gradients synchronizes all ranks, so it is
    written in every step, like a collective."""
    calls, model = current.recorder.calls, current.models.to_reduce()
    where = _line_of(current, frame, above)
    if model is None:
        return where, -1
    call = calls.recurring(f'{_REDUCING}"{model.group}"{where}', model.group)
    current.backward.usual = Usual(frame, above, call, model.ref)
    return where, calls.begin_own(call, current.recorder.step)


def _line_of(current: Session, frame: FrameType, above: FrameType) -> str:
    """The field with the source line; calls from one place are looked up once."""
    recorder, known = current.recorder, current.backward.lines
    key = id(frame.f_code), frame.f_lasti, id(above.f_code), above.f_lasti
    before = known.get(key)
    if before is None:
        # With the code, so that no other gets its id.
        before = recorder.lines.caller(), frame.f_code, above.f_code
        recorder.flush_definitions()
        if len(known) < MOST_PLACES:
            known[key] = before
    return before[0]


def _look(current: Session, here: bool, loss: Any) -> None:
    current.backward.steps_optimizer = False
    if current.models.open and here:
        ddp.interrupt(current, perf_counter_ns(), loss)
    if current.devices is not None and current.devices.timing:
        current.devices.mark("bwd")


def _after(token: _Token | int, result: Any) -> None:
    if not isinstance(token, int):
        _after_in_full(token, result)
        return
    current = active.session
    if current is not None:
        current.backward.depth = 0
        if not isinstance(result, BaseException):
            current.recorder.calls.end(token)


def _after_in_full(token: _Token, result: Any) -> None:
    current, start, where, place = token
    end = perf_counter_ns() if start else 0
    backward = current.backward
    backward.depth -= 1
    if not isinstance(result, BaseException):
        current.recorder.calls.end(place)
    if not start or backward.depth or current is not active.session:
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
        ddp.resume(current, end)
    if backward.steps_optimizer and not isinstance(result, BaseException):
        optimizers.end_of_stepping_backward(current, end)


def install(patches: Patches) -> None:
    """Replace ``torch.autograd.backward``, which ``Tensor.backward`` looks up at each call."""
    import torch

    failed = exception_recorder(Phase.BACKWARD)
    wrapper = around(torch.autograd.backward, _PART, _before, _after, failed=failed)
    patches.attribute(torch.autograd, "backward", wrapper)
