"""Backward passes, and when each of DDP's buckets was ready in them."""

from __future__ import annotations

import sys
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from ...rundir import EventField, EventKind, Phase
from ..guard import part
from ..patching import Patches, around
from ..recording import MOST_PLACES, Recorder, Session, active, backwards, raising_in, recording_here
from . import forwards, optimizers

_PART = part("backward passes")
_BACKWARD = EventKind.BACKWARD.opening
_REDUCING = EventKind.BACKWARD.opening + EventField.GROUP.next_key

_Token = tuple[Session, int, str, int]
"""The recording, the start, 0 in steps of which only the times are kept, the field with the source line, and where the call was
written down."""


def _before(args: Any, kwargs: Any) -> _Token | None:
    current = active.session
    if current is None:
        return None
    recorder, backward = current.recorder, current.backward
    here, full = recorder.thread == get_ident(), backwards.full
    if not here and (current.thread_is_known or not full):
        return None
    where, place = "", -1
    if not backward.depth:
        if here:
            # In every step, so in as few calls as can be.
            frame = sys._getframe(2)
            above = frame.f_back or frame
            key = id(frame.f_code), frame.f_lasti, id(above.f_code), above.f_lasti
            known = recorder.calls.known.get(key)
            where = _first_seen(recorder, key) if known is None else known[0]
            place = _begin_reduction(current, where)
        if full:
            _look(current, here, args[0] if args else kwargs.get("tensors"))
    start = perf_counter_ns() if full else 0
    # Last: nobody would set it back where a handler of the job's raised before this.
    backward.depth += 1
    return current, start, where, place


def _first_seen(recorder: Recorder, key: tuple[Any, ...]) -> str:
    """The field with the source line of a backward that is called from a new place."""
    where = recorder.lines.caller()
    recorder.flush_definitions()
    if len(recorder.calls.known) < MOST_PLACES:
        recorder.calls.known[key] = where, "", ""
    return where


def _begin_reduction(current: Session, where: str) -> int:
    """All ranks meet in a backward in which DDP reduces gradients: it is written down as a collective is, in every step."""
    first = current.models.first
    if first is None:
        return -1
    ddp, group = first.ref(), first.group
    if ddp is None or not getattr(ddp, "require_backward_grad_sync", True):
        other = current.models.group_to_reduce_in()
        if other is None:
            return -1
        group = other
    recorder = current.recorder
    return recorder.calls.begin_own(recorder.step, f'{_REDUCING}"{group}"{where}', group)


def _look(current: Session, here: bool, loss: Any) -> None:
    current.backward.steps_optimizer = False
    if current.models.open and here:
        forwards.interrupt(current, perf_counter_ns(), loss)
    if current.devices is not None and current.devices.timing:
        current.devices.mark("bwd")


def _after(token: _Token, result: Any) -> None:
    current, start, where, place = token
    end = perf_counter_ns() if start else 0
    backward = current.backward
    backward.depth -= 1
    if place >= 0 and not isinstance(result, BaseException):
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
        forwards.resume(current, end)
    if backward.steps_optimizer and not isinstance(result, BaseException):
        optimizers.end_of_stepping_backward(current, end)


def install(patches: Patches) -> None:
    """Replace ``torch.autograd.backward``, which ``Tensor.backward`` looks up at each call."""
    import torch

    failed = raising_in(Phase.BACKWARD)
    wrapper = around(torch.autograd.backward, _PART, _before, _after, failed=failed)
    patches.attribute(torch.autograd, "backward", wrapper)
