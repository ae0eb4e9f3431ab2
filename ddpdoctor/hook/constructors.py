"""Where the job built its data loaders and DDP modules: the line whose arguments a fix would change.

A loader is often built before the process group, when nothing is recorded yet, so the line is kept beside the
object until the recording asks for it.
"""

from __future__ import annotations

import weakref
from types import CodeType
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import session
from .guard import part
from .patching import Patches, around
from .where import Kinds, Lines

_PART = part("constructors")

_Built = Tuple["weakref.ref[Any]", CodeType, int]
_built: Dict[int, _Built] = {}
"""By the object's id: an object need not be hashable."""
_kinds: List[Kinds] = []


def _before(args: Any, kwargs: Any) -> Optional[bool]:
    thing = args[0]
    known = _built.get(id(thing))
    if known is not None and known[0]() is thing:
        return None
    if not _kinds:
        _kinds.append(Kinds())
    # Above the wrapper, whatever user's line comes first: a subclass's own constructor counts as one.
    found = _kinds[0].user_frame(session.calling_frame())
    if found is not None:
        key = id(thing)
        _built[key] = weakref.ref(thing, _forgetter(key)), found.f_code, found.f_lineno
    return None


def _forgetter(key: int) -> "Callable[[weakref.ref[Any]], None]":
    def forget(reference: "weakref.ref[Any]") -> None:
        known = _built.get(key)
        if known is not None and known[0] is reference:
            del _built[key]

    return forget


def _nothing(token: bool, result: Any) -> None:
    pass


def line_of(thing: Any, lines: Lines) -> Optional[int]:
    """The number of the line that built ``thing``; None where that was not seen."""
    known = _built.get(id(thing))
    if known is None or known[0]() is not thing:
        return None
    return lines.id_of(known[1], known[2])


def install(patches: Patches) -> None:
    """Wrap both constructors, which subclasses call."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    for owner in (DistributedDataParallel, DataLoader):
        patches.attribute(owner, "__init__", around(owner.__init__, _PART, _before, _nothing))
