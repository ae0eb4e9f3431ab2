"""Checkpoints: the training thread's time in saving and loading. They are recorded in all steps, also in those of which else only the times
are kept: they are rare, and the work since the last one is what a restart repeats."""

from __future__ import annotations

from threading import get_ident
from time import perf_counter_ns
from typing import Any

from ...rundir import EventKind
from .. import finder, lifetime
from ..guard import part
from ..patching import After, Before, Patches, around, torch_patches
from ..recording import active

_PART = part("checkpoints")
_DISTRIBUTED = {
    "torch.distributed.checkpoint.state_dict_saver": (
        EventKind.SAVE,
        ("save", "async_save", "save_state_dict"),
    ),
    "torch.distributed.checkpoint.state_dict_loader": (EventKind.LOAD, ("load", "load_state_dict")),
}

_Token = tuple[int, str]
"""The start, perf_counter_ns, and the fields of the event."""

_depth = [0]
"""How many of these functions are in progress, one in another."""


def _event(kind: EventKind) -> tuple[Before, After]:
    opening = kind.opening

    def before(args: Any, kwargs: Any) -> _Token | None:
        recorder = active.recorder
        if recorder is None or recorder.thread != get_ident():
            return None
        token = perf_counter_ns(), opening + recorder.lines.caller(through=True)
        # Last: it would stay raised where a handler of the job's raised before this.
        _depth[0] += 1
        return token

    def after(token: _Token, result: Any) -> None:
        end = perf_counter_ns()
        _depth[0] = max(0, _depth[0] - 1)
        recorder = active.recorder
        # One that raised leaves no checkpoint, or none that was read: what counts them must not see it.
        if recorder is not None and not _depth[0] and not isinstance(result, BaseException):
            recorder.add(token[0], end - token[0], token[1])
            if kind is EventKind.SAVE:
                recorder.note_saved()

    return before, after


def install(patches: Patches) -> None:
    """Wrap ``torch.save`` and ``torch.load``, and the distributed checkpoint's once the job imports it."""
    import torch

    lifetime.depths.append(_depth)
    for kind, name in ((EventKind.SAVE, "save"), (EventKind.LOAD, "load")):
        original = getattr(torch, name)
        timed = around(original, _PART, *_event(kind))
        for module in (torch, torch.serialization):
            if vars(module).get(name) is original:
                patches.attribute(module, name, timed)
    for module_name in _DISTRIBUTED:
        finder.after_import(module_name, __name__, "install_distributed")


def install_distributed() -> None:
    """Wrap what has been imported of ``torch.distributed.checkpoint``."""
    import sys

    for module_name, (kind, names) in _DISTRIBUTED.items():
        module = sys.modules.get(module_name)
        for name in names:
            original = vars(module).get(name) if module is not None else None
            if original is not None and not hasattr(original, "_torchdynamo_disable"):
                torch_patches.attribute(module, name, around(original, _PART, *_event(kind)))
