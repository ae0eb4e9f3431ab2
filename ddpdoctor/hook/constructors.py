"""Where the job built its data loaders and DDP modules: the line whose arguments a fix would change.

A loader is often built before the process group, when nothing is recorded yet, so the line is kept beside the
object until the recording asks for it.
"""

from __future__ import annotations

import weakref
from types import CodeType, FrameType
from typing import Any, Dict, List, Optional, Tuple

from . import session
from .guard import part
from .numbered import forgetter
from .patching import Patches, around
from .where import HIDDEN, USER, Kinds, Lines

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
    key = id(thing)
    # Above the wrapper, whatever user's line comes first: a subclass's own constructor counts as one.
    frame = session.calling_frame()
    found = _kinds[0].user_frame(frame)
    if found is None:
        return None
    place = None
    if _built_by(frame) != _kinds[0].of(found.f_code):
        place = _place_of_original(kwargs.get("dataset", args[1] if len(args) > 1 else None))
    _built[key] = weakref.ref(thing, forgetter(_built, key)), *(place or (found.f_code, found.f_lineno))
    return None


def _built_by(frame: Optional[FrameType]) -> int:
    """Whose code builds the object: constructors of installed packages are not asked, but who calls them."""
    while frame is not None:
        kind = _kinds[0].of(frame.f_code)
        if kind == USER or (kind != HIDDEN and frame.f_code.co_name != "__init__"):
            return kind
        frame = frame.f_back
    return HIDDEN


def _place_of_original(dataset: Any) -> Optional[Tuple[CodeType, int]]:
    """Where the loader of ``dataset`` was built that a framework puts its own in place of (accelerate's ``prepare``,
    Lightning's ``fit``): the arguments stand there. None where no place, or more than one, has built such loaders.
    """
    places = set()
    for reference, code, line in list(_built.values()):
        known = reference()
        # Not by getattr: a property would be the job's code.
        if dataset is not None and known is not None and vars(known).get("dataset") is dataset:
            places.add((code, line))
    return places.pop() if len(places) == 1 else None


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
