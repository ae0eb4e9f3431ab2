"""Processes that ``torch.multiprocessing.spawn`` starts: it catches the exception of such a one, hands its text to the parent and
ends the process at once, so that nothing registered for the exit is run."""

from __future__ import annotations

import importlib
from typing import Any

from .. import lifetime
from ..guard import part
from ..patching import Patches, around

_PART = part("exceptions of spawned processes")


def _before(args: Any, kwargs: Any) -> None:
    pass


def _caught(raised: BaseException) -> None:
    if isinstance(raised, SystemExit) and isinstance(raised.__context__, Exception):
        lifetime.tell_end(raised.__context__)


def install(patches: Patches) -> None:
    """Wrap what runs in the new process; it is found there by its name."""
    spawn = importlib.import_module("torch.multiprocessing.spawn")  # the package has a function of that name
    patches.attribute(spawn, "_wrap", around(spawn._wrap, _PART, _before, failed=_caught))
