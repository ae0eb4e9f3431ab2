"""Optimizers without hooks: those that ``torch.compile`` makes of torch's own in torch 2.1 and some later versions.

Its first call replaces their ``step``, for good, with the function that torch had wrapped to call the hooks, and marks
those not wrapped yet as if they were. The hook wraps that function to do what the optimizer hooks do.
"""

from __future__ import annotations

import sys
from time import perf_counter_ns
from typing import Any

from .. import finder
from ..guard import part
from ..patching import Patches, around, torch_patches
from . import optimizers

_PART = part("optimizer steps")
_DYNAMO = "torch._dynamo.eval_frame"
_MARK = "hooked"
"""The attribute of a ``step`` by which torch knows that it calls the hooks."""

_Steps = dict[Any, tuple[Any, bool]]
"""By class of optimizer: its ``step``, and whether that is marked."""


def _steps(args: Any, kwargs: Any) -> _Steps:
    from torch import optim

    classes: list[Any] = [
        each for each in vars(optim).values() if isinstance(each, type) and "step" in vars(each)
    ]
    return {each: (each.step, hasattr(each.step, _MARK)) for each in classes}


def _hook_again(before: _Steps, result: Any) -> None:
    for owner, (step, marked) in _steps((), {}).items():
        former, was_marked = before[owner]
        if marked and (not was_marked or getattr(former, "__wrapped__", None) is step):
            torch_patches.attribute(owner, "step", around(step, _PART, _before, _after))


def _before(args: Any, kwargs: Any) -> Any | None:
    optimizers.before_step(args[0], args, kwargs)
    return args[0]


def _after(optimizer: Any, result: Any) -> None:
    if not isinstance(result, BaseException):
        optimizers.after_step(optimizer, perf_counter_ns())


def install(patches: Patches) -> None:
    """Wait for the compiler, which most jobs never import."""
    finder.after_import(_DYNAMO, __name__, "watch")


def watch() -> None:
    """Wrap the function that takes the hooks off, where this torch has one."""
    patcher = getattr(sys.modules[_DYNAMO], "TorchPatcher", None)
    patch: Any = getattr(patcher, "patch", None)
    code = getattr(getattr(patch, "__wrapped__", patch), "__code__", None)
    if code is not None and _MARK in code.co_consts:
        torch_patches.attribute(patcher, "patch", around(patch, _PART, _steps, _hook_again))
