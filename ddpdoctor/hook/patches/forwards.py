"""A forward in which backwards run and optimizers step: what becomes of it at each of them.

A backward inside a forward ends what was computed for it, and begins the next part; only the training thread comes here.
"""

from __future__ import annotations

from typing import Any

from ...rundir import EventField, EventKind
from ..job import OpenForward
from ..recording import Session, recording_here

FORWARD = EventKind.FORWARD.opening + EventField.MODULE.next_key
"""Where the fields of a forward's event begin; the module's number follows, and the size of the inputs."""


def interrupt(current: Session, at: int, loss: Any) -> None:
    """A backward of ``loss`` begins at ``at``, perf_counter_ns, inside the innermost open forward."""
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
        # Whoever calls backward here has DDP prepare for it just before.
        current.models.forward_ended(model, at)
        model.reduces = getattr(forward.ddp, "require_backward_grad_sync", True)
    if devices is not None and model.reduces:
        devices.gradients_follow(loss)


def pause(current: Session) -> None:
    """An optimizer is about to step inside the innermost open forward: what came since the backward led to none."""
    forward = current.models.open[-1]
    if forward.interrupted and forward.since is not None:
        forward.since = None
        if current.devices is not None:
            current.devices.unmark("fwd")


def resume(current: Session, at: int) -> None:
    """The backward, or the optimizer's step, inside the innermost open forward is over: there may be one more backward."""
    forward = current.models.open[-1]
    if forward.since is None:
        forward.since = at
        if current.devices is not None and current.devices.timing:
            current.devices.mark("fwd")


def leave(current: Session, forward: OpenForward, start: int) -> int | None:
    """This forward, which began at ``start``, is over. When what its event tells of began; None where there is nothing to tell.

    Both are perf_counter_ns.
    """
    # A forward inside this one may have been left by an exception.
    opened = current.models.open
    del opened[opened.index(forward) if forward in opened else len(opened) :]
    if not forward.interrupted:
        return start
    if not getattr(forward.ddp, "require_backward_grad_sync", True):
        # Its backward was inside; what comes behind that belongs to none.
        current.models.find(forward.ddp, current.recorder.lines).forward_end = None
        if forward.since is not None and current.devices is not None:
            current.devices.unmark("fwd")
        return None
    return start if forward.since is None else max(forward.since, current.recorder.start_perf_ns)
