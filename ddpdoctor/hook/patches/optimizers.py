"""Optimizer steps, seen by torch's own global hooks; only the outermost of nested ones counts.

``ZeroRedundancyOptimizer`` steps an optimizer inside its own step, and a subclass that calls ``super().step()`` fires twice.
An optimizer in the backward (``_apply_optimizer_in_backward``) steps once per parameter; all of them together count once, at
the end of the backward. A ``GradScaler`` that skips the step because of an inf is a step without an optimizer step.
"""

from __future__ import annotations

import sys
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Optional, Tuple

from ...rundir import EventField, EventKind, Mark
from .. import lifetime
from ..guard import part
from ..job import job_torch
from ..patching import Patches, around, guarded
from ..recording import IN_BACKWARD, Session, active, backwards
from . import forwards

_PART = part("optimizer steps")

_OPTIMIZER = EventKind.OPTIMIZER.opening + EventField.OPTIMIZER.next_key
_CLOSURE = f"{EventField.CLOSURE.next_key}true"
_SKIPPED = f"{EventKind.OPTIMIZER.opening}{EventField.SKIPPED.next_key}true"


class _OpenStep:
    """The optimizer step in progress."""

    __slots__ = ("depth", "frame", "nested_end", "start", "where")

    def __init__(self) -> None:
        self.depth = 0
        self.frame: Tuple[int, Any] = (0, None)
        """Of torch's wrapper around the outermost step: to see whether it is still running."""
        self.start = 0
        self.nested_end = 0
        """End of the last backward inside it, in a closure: the optimizer's own work begins there."""
        self.where = ""


open_step = _OpenStep()


def _reset() -> None:
    open_step.depth = 0


def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """What torch calls before each step of an optimizer; the caller's caller is the function around that step."""
    current = active.session
    if current is None:
        current = lifetime.arm_alone()
        if current is None:
            return
    frame: Any = sys._getframe(2)
    if open_step.depth and _still_running(frame.f_back):
        open_step.depth += 1
        return
    open_step.depth = 1
    open_step.frame = (id(frame), frame.f_code)
    open_step.nested_end = 0
    if current.backward.depth:
        current.backward.steps_optimizer = backwards.always = True
    elif not backwards.full and _backward_here() != -1:
        # They did not until now, and this backward's end will not be seen: the next one's will.
        open_step.depth = 0
        backwards.always = backwards.full = True
        return
    else:
        if not current.thread_is_known:
            current.follow_training_thread()
        if current.stepping.boundary.round:
            current.stepping.before_optimizer(id(optimizer))
        if current.models.open:
            forwards.pause(current)
        if current.devices is not None and current.devices.timing:
            current.devices.mark("opt")
    open_step.where = current.recorder.lines.caller() if active.full else ""
    open_step.start = perf_counter_ns()


def _backward_here() -> int:
    """torch's number of the backward that this thread runs, -1 outside of one; from the installation on."""
    return -1


def _still_running(frame: Any) -> bool:
    """Whether the outermost step is among the callers; it is not when that step raised, and its end was never seen."""
    wanted, code = open_step.frame
    caller = frame
    while caller is not None:
        if id(caller) == wanted and caller.f_code is code:
            return True
        caller = caller.f_back
    return False


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """And after each that has not raised."""
    current = active.session
    if current is None or not open_step.depth:
        return
    open_step.depth -= 1
    if open_step.depth:
        return
    end = perf_counter_ns()
    if current.backward.depth:
        return
    if current.devices is not None and current.devices.timing:
        current.devices.mark("opt_end")
    recorder = current.recorder
    if active.full and recorder.thread == get_ident():
        number = _number_of(optimizer, current)
        begin, closure = (open_step.nested_end, _CLOSURE) if open_step.nested_end else (open_step.start, "")
        recorder.add(begin, end - begin, f"{_OPTIMIZER}{number}{open_step.where}{closure}")
    current.stepping.after_optimizer(id(optimizer), end)
    if current.models.open:
        forwards.resume(current, end)


def _number_of(optimizer: Any, current: Session) -> int:
    """The number of an optimizer; the line of its first step is the one that rank.json names."""
    number = current.optimizers.find(optimizer)
    if number is None:
        number, where = current.optimizers.count, open_step.where
        current.optimizers.add(optimizer, int(where.rpartition(":")[2]) if where else None, number)
    return number


def end_of_stepping_backward(current: Session, at: int) -> None:
    """A backward in which optimizers stepped has ended."""
    current.stepping.before_optimizer(IN_BACKWARD)
    current.stepping.after_optimizer(IN_BACKWARD, at)


def _before_scaler(args: Any, kwargs: Any) -> Optional[Tuple[Any, int, int]]:
    current = active.session
    if current is None:
        return None
    optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
    current.uses_grad_scaler = True
    return optimizer, current.stepping.optimizer_steps, perf_counter_ns()


def _after_scaler(token: Tuple[Any, int, int], result: Any) -> None:
    optimizer, steps, start = token
    current = active.session
    if current is None or isinstance(result, BaseException) or current.stepping.optimizer_steps != steps:
        return
    if current.recorder.thread != get_ident() or optimizer is None:
        return
    end = perf_counter_ns()
    inner = getattr(optimizer, "optimizer", optimizer)
    current.stepping.before_optimizer(id(inner))
    current.recorder.add(start, end - start, _SKIPPED)
    current.recorder.marks.append(Mark.SKIPPED)
    current.stepping.after_optimizer(id(inner), end)


def install(patches: Patches) -> None:
    """Register the hooks, and watch ``GradScaler.step``."""
    from torch.optim import optimizer as module

    global _backward_here
    lifetime.at_fork.append(_reset)
    told = getattr(job_torch()._C, "_current_graph_task_id", None)
    if told is not None:
        _backward_here, backwards.always = told, False

    before, after = guarded(_PART, before_step), guarded(_PART, after_step)
    hooks = module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks
    handles = (
        module.register_optimizer_step_pre_hook(before),
        module.register_optimizer_step_post_hook(after),
    )
    for table, handle, hook in zip(hooks, handles, (before, after)):
        patches.add(
            lambda table=table, handle=handle, hook=hook: table.__setitem__(handle.id, hook),  # type: ignore[misc]
            lambda table=table, handle=handle: table.pop(handle.id),  # type: ignore[misc]
        )
    scaler = sys.modules.get("torch.amp.grad_scaler") or sys.modules.get("torch.cuda.amp.grad_scaler")
    if scaler is not None:
        patches.attribute(
            scaler.GradScaler, "step", around(scaler.GradScaler.step, _PART, _before_scaler, _after_scaler)
        )
