"""Wraps backward passes, and records when each of DDP's buckets was ready in them."""

from __future__ import annotations

import functools
import sys
import weakref
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any, Callable

from ...rundir import EventField, EventKind, Phase
from ..guard import part
from ..patching import Patches, around, count_failure, exclude_from_compile, hide_from_warnings
from ..recording import MOST_PLACES, Call, Session, active, backwards, exception_recorder, recording_here
from . import ddp, optimizers

_PART = part("backward passes")
_BACKWARD = EventKind.BACKWARD.opening
_REDUCING = EventKind.BACKWARD.opening + EventField.GROUP.next_key

_TENSOR_BACKWARD: Any = None
"""The code of ``Tensor.backward``; set by ``install``."""

_SLOW_PATH = -2
"""``place`` of a backward that does not take the fast path. -1: it takes the fast path, but the calls page has no free slot for it."""

_Token = tuple[Session, int, str, int]
"""The session, the start (0 in steps of which only the times are kept), the field with the source line, and the index of the call
in the calls page."""


class LastBackward:
    """The last backward. The next one is usually called from the same line and reduces the same model."""

    __slots__ = ("at", "call", "code", "is_method", "model")

    def __init__(self, frame: FrameType, call: Call, model: weakref.ref[Any]) -> None:
        """``frame`` called ``torch.autograd.backward``. It is ``Tensor.backward`` or the caller's own frame."""
        caller = frame.f_back
        self.is_method = frame.f_code is _TENSOR_BACKWARD and caller is not None
        called = caller if self.is_method and caller is not None else frame
        self.code, self.at = called.f_code, called.f_lasti
        self.call, self.model = call, model


def _fast_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:  # noqa: C901
    """Like ``around``, with a fast path for a backward from the usual line in a step of which only the times are kept. Almost every
    step takes the fast path. It makes as few calls as possible, because the hook's code is not in the CPU caches then."""
    failed = exception_recorder(Phase.BACKWARD)
    slow_path = around(original, _PART, _before, _after, failed=failed)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:  # noqa: C901
        place, current = _SLOW_PATH, active.session
        if current is not None and not backwards.full and not _PART.off:
            try:
                recorder, backward = current.recorder, current.backward
                last = backward.last
                if last is not None and not backward.depth and recorder.thread == get_ident():
                    frame, model = sys._getframe(1), last.model()
                    if last.is_method:
                        frame = frame.f_back or frame
                    if frame.f_code is last.code and frame.f_lasti == last.at and model is not None:
                        if model.require_backward_grad_sync:
                            place = recorder.calls.begin(last.call, recorder.step, by_ddp=True)
                            numbers = recorder.calls.numbers
                            # Set last: an exception from a signal handler of the job must not leave it set.
                            backward.depth = 1
            except Exception as error:
                place = _SLOW_PATH
                if not count_failure(_PART, error):
                    raise
        try:
            if place == _SLOW_PATH:
                return slow_path(*args, **kwargs)
            result = original(*args, **kwargs)
        except BaseException as raised:
            if place != _SLOW_PATH:
                backward.depth = 0
                try:
                    failed(raised)
                except Exception as error:
                    if not count_failure(_PART, error):
                        raise
            # Remove this wrapper's line from the traceback, as in ``around``.
            raised.__traceback__ = raised.__traceback__ and raised.__traceback__.tb_next
            raise
        backward.depth = 0
        if place >= 0:
            try:
                numbers[place] = 0
            except ValueError:
                pass  # the recording has ended
        return result

    hide_from_warnings(wrapper)
    exclude_from_compile(wrapper)
    return wrapper


def _before(args: Any, kwargs: Any) -> _Token | None:
    current = active.session
    if current is None:
        return None
    recorder, backward, full = current.recorder, current.backward, backwards.full
    on_training_thread = recorder.thread == get_ident()
    if not on_training_thread and (current.thread_is_known or not full):
        return None
    where, place = "", -1
    if on_training_thread and not backward.depth:
        where, place = _begin_reduction(current, sys._getframe(3))
        if full:
            backward.steps_optimizer = False
            if current.models.open:
                ddp.interrupt(current, perf_counter_ns(), args[0] if args else kwargs.get("tensors"))
            if current.devices is not None and current.devices.timing:
                current.devices.mark("bwd")
    start = perf_counter_ns() if full else 0
    # Set last: an exception from a signal handler of the job must not leave it set.
    backward.depth += 1
    return current, start, where, place


def _begin_reduction(current: Session, frame: FrameType) -> tuple[str, int]:
    """Return the field with the source line, and the index of the call in the calls page. A backward in which DDP reduces gradients
    synchronizes all ranks, so it is recorded in every step, like a collective."""
    calls, model = current.recorder.calls, current.models.first_reducing()
    where = _line_of(current, frame, frame.f_back or frame)
    if model is None:
        return where, -1
    call = calls.recurring(f'{_REDUCING}"{model.group}"{where}', model.group)
    current.backward.last = LastBackward(frame, call, model.ref)
    return where, calls.begin(call, current.recorder.step, by_ddp=True)


def _line_of(current: Session, frame: FrameType, above: FrameType) -> str:
    """The field with the source line, cached by place."""
    recorder, known = current.recorder, current.backward.lines
    key = id(frame.f_code), frame.f_lasti, id(above.f_code), above.f_lasti
    cached = known.get(key)
    if cached is None:
        # Keeping the code objects prevents reuse of their ids.
        cached = recorder.lines.caller(), frame.f_code, above.f_code
        recorder.flush_definitions()
        if len(known) < MOST_PLACES:
            known[key] = cached
    return cached[0]


def _after(token: _Token, result: Any) -> None:
    current, start, where, place = token
    end = perf_counter_ns() if start else 0
    backward = current.backward
    backward.depth -= 1
    if not isinstance(result, BaseException):
        current.recorder.calls.end(place)
    if not start or backward.depth or current is not active.session:
        return
    if optimizers.open_step.depth:
        # The backward may have run in the optimizer's closure.
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

    global _TENSOR_BACKWARD
    _TENSOR_BACKWARD = torch.Tensor.backward.__code__
    patches.attribute(torch.autograd, "backward", _fast_wrapper(torch.autograd.backward))
