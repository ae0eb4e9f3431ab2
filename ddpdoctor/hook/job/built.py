"""Where the job built its data loaders and DDP modules: the line whose arguments a fix would change.

A loader is often built before the process group, when nothing is recorded yet, so the line is kept beside the object until
the recording asks for it.
"""

from __future__ import annotations

import weakref
from types import CodeType, FrameType
from typing import Any, Dict, List, Optional, Tuple

from .numbered import forgetter
from .source_lines import HIDDEN, USER, Kinds, Lines

_Built = Tuple["weakref.ref[Any]", CodeType, int]
_built: Dict[int, _Built] = {}
"""By the object's id: an object need not be hashable."""
_kinds: List[Kinds] = []
"""One, made when it is first needed: it asks for the interpreter's folders, which takes time."""


def note_built(thing: Any, dataset: Any, frame: Optional[FrameType]) -> None:
    """The constructor of ``thing`` begins, a loader of ``dataset`` perhaps, in the stack that ends in ``frame``."""
    key = id(thing)
    known = _built.get(key)
    if known is not None and known[0]() is thing:
        return
    if not _kinds:
        _kinds.append(Kinds())
    # Whatever user's line comes first: a subclass's own constructor counts as one.
    users = _kinds[0].user_frame(frame)
    if users is None:
        return
    place = None
    if _built_by(frame) != _kinds[0].of(users.f_code):
        place = _place_of_original(dataset)
    _built[key] = weakref.ref(thing, forgetter(_built, key)), *(place or (users.f_code, users.f_lineno))


def _built_by(frame: Optional[FrameType]) -> int:
    """Whose code builds the object: constructors of installed packages are not asked, but who calls them."""
    caller = frame
    while caller is not None:
        kind = _kinds[0].of(caller.f_code)
        if kind == USER or (kind != HIDDEN and caller.f_code.co_name != "__init__"):
            return kind
        caller = caller.f_back
    return HIDDEN


def _place_of_original(dataset: Any) -> Optional[Tuple[CodeType, int]]:
    """Where the loader of ``dataset`` was built that a framework puts its own in place of.

    accelerate's ``prepare`` and Lightning's ``fit`` do; the arguments stand where the original was built. None where no
    place, or more than one, has built such loaders.
    """
    places = set()
    for reference, code, line in list(_built.values()):
        known = reference()
        # Not by getattr: a property would be the job's code.
        if dataset is not None and known is not None and vars(known).get("dataset") is dataset:
            places.add((code, line))
    return places.pop() if len(places) == 1 else None


def line_of(thing: Any, lines: Lines) -> Optional[int]:
    """The number of the line that built ``thing``; None where that was not seen."""
    known = _built.get(id(thing))
    if known is None or known[0]() is not thing:
        return None
    return lines.id_of(known[1], known[2])
