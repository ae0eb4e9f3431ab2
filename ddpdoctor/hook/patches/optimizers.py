"""Detects optimizer steps by torch's global hooks. Only the outermost of nested steps counts.

``ZeroRedundancyOptimizer`` steps an inner optimizer, and a subclass that calls ``super().step()`` fires the hooks twice. Optimizers
in the backward (``_apply_optimizer_in_backward``) step once per parameter; together they count as one step, at the end of the
backward. If a ``GradScaler`` skips the optimizer step because of an inf, that still counts as a step.

With ``torch.compile``, in torch 2.1 and some later versions, torch's own optimizers lose their hooks. The first call permanently
replaces their ``step`` by the undecorated function, and marks a ``step`` that was never decorated as if it were. The hook wraps
those functions to do what the hooks do.
"""

from __future__ import annotations

import sys
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from ...rundir.stepevents import EventField, EventKind
from .. import finder, lifetime
from ..guard import part
from ..job import Role, job_torch
from ..patching import Patches, around, count_failure, exclude_from_compile, guarded, torch_patches
from ..recording import IN_BACKWARD, Session, active, backwards, starts
from . import ddp

_PART = part("optimizer steps")

_OPTIMIZER = EventKind.OPTIMIZER.opening + EventField.OPTIMIZER.next_key


class _OpenStep:
    """The optimizer step in progress."""

    __slots__ = ("code", "depth", "frame", "has_nested_steps", "nested_end", "role", "start", "where")

    def __init__(self) -> None:
        self.depth = 0
        self.frame = 0
        """Id of the frame of torch's function for the outermost step."""
        self.code: Any = None
        """Its code."""
        self.role: Role | None = None
        """The role of its optimizer, if determined at the start."""
        self.start = 0
        self.nested_end = 0
        """End of the last backward inside the step, in a closure. The optimizer's own work begins there."""
        self.where = ""
        self.has_nested_steps = False
        """Whether this job's optimizers call each other's steps."""


open_step = _OpenStep()
_frame_above = sys._getframe


def _reset() -> None:
    open_step.depth = 0


def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """torch calls this before each optimizer step. Two frames above is torch's function for that step."""
    current = active.session
    if current is None:
        current = lifetime.arm_alone()
        if current is None:
            return
    frame: Any = sys._getframe(2)
    if open_step.depth and _is_in_stack(open_step.code, frame.f_back, open_step.frame):
        # Otherwise the outer step raised, and its end was not recorded.
        open_step.depth += 1
        open_step.has_nested_steps = True
        return
    open_step.depth = 1
    open_step.frame, open_step.code = id(frame), frame.f_code
    open_step.nested_end, open_step.role = 0, None
    if current.backward.depth:
        current.backward.steps_optimizer = backwards.always = True
    elif not backwards.full and _graph_task_id() != -1:
        # First step inside a backward. The end of this backward will not be recorded; those of later ones will.
        open_step.depth = 0
        backwards.always = backwards.full = True
        return
    else:
        if not current.thread_is_known:
            current.follow_training_thread()
        if current.stepping.boundary.round:
            open_step.role = current.roles.of(optimizer)
            current.stepping.before_optimizer(open_step.role)
        if current.models.open:
            ddp.pause(current)
        if current.devices is not None and current.devices.timing:
            current.devices.mark("opt")
    open_step.where = current.recorder.lines.caller() if active.full else ""
    open_step.start = perf_counter_ns()


def _graph_task_id() -> int:
    """torch's id of the backward that this thread runs; -1 if none. Placeholder; ``install`` sets torch's function."""
    return -1


def _is_in_stack(code: Any, caller: Any, frame: int = 0) -> bool:
    """Whether ``caller`` or one of its callers runs ``code``. If ``frame``, a frame's id, is given, only that frame counts."""
    while caller is not None:
        if caller.f_code is code and (not frame or id(caller) == frame):
            return True
        caller = caller.f_back
    return False


def after_step(optimizer: Any, end: int) -> None:
    """Record the end, at ``end`` (perf_counter_ns), of a step whose start was recorded."""
    current = active.session
    if current is None or not open_step.depth:
        return
    open_step.depth -= 1
    if open_step.depth:
        return
    if current.backward.depth:
        return
    if current.devices is not None and current.devices.timing:
        current.devices.mark("opt_end")
    recorder = current.recorder
    if active.full and recorder.thread == get_ident():
        number = _number_of(optimizer, current)
        begin = open_step.nested_end or open_step.start
        recorder.add(begin, end - begin, f"{_OPTIMIZER}{number}{open_step.where}")
    current.stepping.after_optimizer(open_step.role or current.roles.of(optimizer), end)
    if current.models.open:
        ddp.resume(current, end)


def _after_optimizer_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """torch calls this after each optimizer step that did not raise. Two frames above is the caller of that step.

    Raises only exceptions of the job's signal handlers. The model's data have displaced the hook's code and data from the CPU caches
    by then, so in a brief step it reads few objects and calls few functions, of Python or of C.
    """
    at = perf_counter_ns()
    try:
        if (
            not starts.full
            and id(optimizer) == starts.optimizer_id
            and _frame_above(2).f_code is starts.caller
        ):
            recorder = active.recorder
            if recorder is not None and recorder.end_brief_step(at):
                return
        if not _PART.off:
            _handle_step_end(optimizer, at, _frame_above(1))
    except Exception as error:
        starts.full = True
        if not count_failure(_PART, error):
            raise


def _handle_step_end(optimizer: Any, at: int, step_frame: Any) -> None:
    """Handle the end of an optimizer step at ``at``, perf_counter_ns. ``step_frame`` is the frame of torch's function for that
    step."""
    if starts.full:
        after_step(optimizer, at)
        if not active.full and not open_step.depth:
            _expect_brief_steps(optimizer, step_frame.f_back)
        return
    current = active.session
    if current is None:
        return
    caller: Any = step_frame.f_back
    if id(optimizer) == starts.optimizer_id and caller.f_code is starts.caller:
        current.stepping.after_brief(at)
    elif _is_in_stack(step_frame.f_code, caller):
        # It is nested in another optimizer's step. The end of that one must still be handled as a brief step's, because
        # its start was not recorded.
        open_step.has_nested_steps, starts.caller = True, None
    elif id(optimizer) == starts.optimizer_id:
        starts.caller, starts.full = caller.f_code, open_step.has_nested_steps
        current.stepping.after_brief(at)
    else:
        _handle_other_optimizer(current, optimizer, caller, at)


def _expect_brief_steps(optimizer: Any, caller: Any) -> None:
    """Stop recording the starts of optimizer steps if their ends suffice, to reduce the cost of steps of which only the times are
    kept. ``caller`` is the frame that called the step of ``optimizer``."""
    current = active.session
    if (
        current is None
        or caller is None
        or open_step.has_nested_steps
        or backwards.always
        or current.models.open
    ):
        return
    role = current.stepping.only_role
    if role is not None and current.roles.of(optimizer) is role:
        starts.expect(optimizer, role.steps > 1, caller)
        starts.full = False


def _handle_other_optimizer(current: Session, optimizer: Any, caller: Any, at: int) -> None:
    """Handle the end, at ``at``, of a step whose start was not recorded, of an optimizer that cannot be recognized by identity."""
    role = current.roles.of(optimizer)
    is_in_backward = _graph_task_id() != -1
    if role is current.stepping.only_role and not is_in_backward:
        role.steps += 1
        starts.expect(optimizer, role.steps > 1, caller)
        starts.full = open_step.has_nested_steps
        current.stepping.after_brief(at)
        return
    starts.full = True
    if is_in_backward:
        backwards.always = backwards.full = True
    else:
        current.stepping.after_optimizer(role, at)


def _number_of(optimizer: Any, current: Session) -> int:
    """The number of an optimizer. At its first step, its source line is registered for rank.json."""
    number = current.optimizers.find(optimizer)
    if number is None:
        number, where = current.optimizers.count, open_step.where
        current.optimizers.add(optimizer, int(where.rpartition(":")[2]) if where else None, number)
    return number


def end_of_stepping_backward(current: Session, at: int) -> None:
    """Handle the end of a backward in which optimizers stepped."""
    current.stepping.before_optimizer(IN_BACKWARD)
    current.stepping.after_optimizer(IN_BACKWARD, at)


def _before_scaler(args: Any, kwargs: Any) -> tuple[Any, int, int] | None:
    current = active.session
    if current is None:
        return None
    optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
    return optimizer, current.stepping.optimizer_steps, perf_counter_ns()


def _after_scaler(token: tuple[Any, int, int], result: Any) -> None:
    optimizer, steps, start = token
    current = active.session
    if current is None or isinstance(result, BaseException) or current.stepping.optimizer_steps != steps:
        return
    if current.recorder.thread != get_ident() or optimizer is None:
        return
    end = perf_counter_ns()
    inner = getattr(optimizer, "optimizer", optimizer)
    current.stepping.before_optimizer(current.roles.of(inner))
    current.recorder.add(start, end - start, EventKind.OPTIMIZER.opening)
    current.stepping.after_optimizer(current.roles.of(inner), end)


def install(patches: Patches) -> None:
    """Register the hooks, and wrap ``GradScaler.step``."""
    from torch.optim import optimizer as module

    global _graph_task_id
    lifetime.at_fork.append(_reset)
    task_id = getattr(job_torch()._C, "_current_graph_task_id", None)
    if task_id is not None:
        _graph_task_id, backwards.always = task_id, False

    before, after = guarded(_PART, before_step, starts), _after_optimizer_step
    exclude_from_compile(after)
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


_DYNAMO = "torch._dynamo.eval_frame"
_HOOKED_ATTRIBUTE = "hooked"
"""The attribute with which torch marks a ``step`` that calls the hooks."""

_Steps = dict[Any, tuple[Any, bool]]
"""By optimizer class: its ``step``, and whether that is marked."""


def _steps(args: Any, kwargs: Any) -> _Steps:
    from torch import optim

    classes: list[Any] = [
        each for each in vars(optim).values() if isinstance(each, type) and "step" in vars(each)
    ]
    return {each: (each.step, hasattr(each.step, _HOOKED_ATTRIBUTE)) for each in classes}


def _restore_hooks(before: _Steps, result: Any) -> None:
    for owner, (step, marked) in _steps((), {}).items():
        former, was_marked = before[owner]
        if marked and (not was_marked or getattr(former, "__wrapped__", None) is step):
            torch_patches.attribute(owner, "step", around(step, _PART, _before_unhooked, _after_unhooked))


def _before_unhooked(args: Any, kwargs: Any) -> Any | None:
    before_step(args[0], args, kwargs)
    return args[0]


def _after_unhooked(optimizer: Any, result: Any) -> None:
    if not isinstance(result, BaseException):
        after_step(optimizer, perf_counter_ns())


def install_unhooked(patches: Patches) -> None:
    """Have ``watch_compiler`` called when the compiler is imported, which most jobs never do."""
    finder.after_import(_DYNAMO, __name__, "watch_compiler")


def watch_compiler() -> None:
    """Wrap the function that removes the hooks, if this torch has one."""
    patcher = getattr(sys.modules[_DYNAMO], "TorchPatcher", None)
    patch: Any = getattr(patcher, "patch", None)
    code = getattr(getattr(patch, "__wrapped__", patch), "__code__", None)
    if code is not None and _HOOKED_ATTRIBUTE in code.co_consts:
        torch_patches.attribute(patcher, "patch", around(patch, _PART, _steps, _restore_hooks))
