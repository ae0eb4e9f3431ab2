"""Wraps backward passes, and records when each of DDP's buckets was ready in them."""

from __future__ import annotations

import functools
import sys
import weakref
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any, Callable

from ...rundir.stepevents import EventField, EventKind, Phase
from ..guard import part
from ..patching import (
    Patches,
    around,
    count_failure,
    exclude_from_compile,
    hide_from_warnings,
    is_from_job_handler,
)
from ..recording import (
    MOST_PLACES,
    Backward,
    Call,
    Session,
    active,
    backwards,
    exception_recorder,
    recording_here,
)
from . import ddp, optimizers

_PART = part("backward passes")
_BACKWARD = EventKind.BACKWARD.opening
_REDUCING = EventKind.BACKWARD.opening + EventField.GROUP.next_key

_TENSOR_BACKWARD: Any = None
"""The code of ``Tensor.backward``; set by ``install``."""

_SLOW_PATH = -1
"""``place`` of a backward that does not take the fast path."""

_Token = tuple[Session, int, str, int]
"""The session, the start (0 in steps of which only the times are kept), the field with the source line, and the index of the call
in the calls page."""


def _fast_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:  # noqa: C901
    """Like ``around``, with a fast path for a backward from the usual line in a step of which only the times are kept. Almost every
    step takes the fast path. The hook's code and data are not in the CPU caches then, so what it reads is in few objects, all with
    slots, and constants are literals: a name is one more object to read."""
    failed = exception_recorder(Phase.BACKWARD)
    slow_path = around(original, _PART, _before, _after, failed=failed)
    switch, frame_above = backwards, sys._getframe

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:  # noqa: C901
        place, backward = _SLOW_PATH, switch.usual
        if backward is not None and not switch.full:
            try:
                recorder = backward.recorder
                if not backward.depth and recorder.thread == get_ident():
                    frame, model = frame_above(backward.frames), backward.model()
                    if frame.f_code is backward.code and frame.f_lasti == backward.at and model is not None:
                        calls, call = recorder.calls, backward.call
                        numbers = calls.numbers
                        if model.require_backward_grad_sync and numbers is not None:
                            # The same as ``calls.begin(call, recorder.step, by_ddp=True)``. A test compares what both write.
                            turns, last = call.turns, call.last
                            calls.number = number = calls.number + 1
                            calls.ddp_calls = count = calls.ddp_calls + 1
                            turns[0] = turn = turns[0] + 1
                            slot = 32 + count % 8
                            at = slot * 32
                            numbers[at + 1] = 0
                            if calls.written[slot] is not call:
                                numbers[at + 6 : at + 32] = call.text
                                calls.written[slot] = call
                            numbers[at] = 1
                            numbers[at + 2] = turn
                            numbers[at + 3] = last
                            numbers[at + 4] = call.second_last
                            numbers[at + 5] = recorder.step
                            numbers[at + 1] = number
                            call.second_last, call.last = last, turn
                            place = at
                            # Set last: an exception from a signal handler of the job must not leave it set.
                            backward.depth = 1
            except ValueError as error:
                # The recording has ended, or the outermost frame calls ``torch.autograd.backward``: then the stack has fewer frames.
                if is_from_job_handler(error):
                    raise
            except Exception as error:
                place, switch.usual = _SLOW_PATH, None
                if not count_failure(_PART, error):
                    raise
        try:
            if place == _SLOW_PATH:
                if _PART.off:
                    switch.usual = None
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
    _expect(current.backward, frame, call, model.ref)
    return where, calls.begin(call, current.recorder.step, by_ddp=True)


def _expect(backward: Backward, frame: FrameType, call: Call, model: weakref.ref[Any]) -> None:
    """Expect the next backwards to be like this one. ``frame`` called ``torch.autograd.backward``. It is ``Tensor.backward`` or the
    caller's own frame."""
    # A signal handler of the job may call a backward before the last field is set.
    backwards.usual = None
    caller = frame.f_back
    is_method = frame.f_code is _TENSOR_BACKWARD and caller is not None
    called = caller if is_method and caller is not None else frame
    backward.frames = 2 if is_method else 1
    backward.code, backward.at = called.f_code, called.f_lasti
    backward.call, backward.model = call, model
    if call.text is not None:
        backwards.usual = backward


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
