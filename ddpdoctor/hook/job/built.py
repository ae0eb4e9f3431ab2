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

_Place = Tuple[CodeType, int]
_Built = Tuple["weakref.ref[Any]", Tuple[_Place, int]]
_built: Dict[int, _Built] = {}
"""By the object's id, for an object need not be hashable: where it was built, and the id of the data set it was given."""
_loaders_of: Dict[int, Dict[Tuple[int, int], List[_Place]]] = {}
"""By the id of a data set, which its loaders keep alive, and by the place (the id of the code, the line): the place once for each
loader that was built there and lives."""
_kinds: List[Kinds] = []
"""One, made when it is first needed: it asks for the interpreter's folders, which takes time."""


def note_built(thing: Any, dataset: Any, frame: Optional[FrameType]) -> None:
    """The constructor of ``thing`` begins, a loader of ``dataset`` unless that is None, in the stack that ends in ``frame``."""
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
    if dataset is not None and _built_by(frame) != _kinds[0].of(users.f_code):
        place = _place_of_original(dataset)
    place = place or (users.f_code, users.f_lineno)
    _built[key] = weakref.ref(thing, forgetter(_built, key, _forget_loader)), (place, id(dataset))
    if dataset is not None:
        _loaders_of.setdefault(id(dataset), {}).setdefault(_key_of(place), []).append(place)


def _key_of(place: _Place) -> Tuple[int, int]:
    # To hash code is to hash its constants.
    return id(place[0]), place[1]


def _forget_loader(built: Tuple[_Place, int]) -> None:
    place, dataset = built
    places = _loaders_of.get(dataset, {})
    alive = places.get(_key_of(place), [])
    if alive:
        alive.pop()
    if not alive:
        places.pop(_key_of(place), None)
    if not places:
        _loaders_of.pop(dataset, None)


def _built_by(frame: Optional[FrameType]) -> int:
    """Whose code builds the object: constructors of installed packages are not asked, but who calls them."""
    caller = frame
    while caller is not None:
        kind = _kinds[0].of(caller.f_code)
        if kind == USER or (kind != HIDDEN and caller.f_code.co_name != "__init__"):
            return kind
        caller = caller.f_back
    return HIDDEN


def _place_of_original(dataset: Any) -> Optional[_Place]:
    """Where the loader of ``dataset`` was built that a framework puts its own in place of.

    accelerate's ``prepare`` and Lightning's ``fit`` do; the arguments stand where the original was built. None where no
    place, or more than one, has built such loaders.
    """
    places = _loaders_of.get(id(dataset), {})
    return next(iter(places.values()))[0] if len(places) == 1 else None


def line_of(thing: Any, lines: Lines) -> Optional[int]:
    """The number of the line that built ``thing``; None where that was not seen."""
    known = _built.get(id(thing))
    if known is None or known[0]() is not thing:
        return None
    code, line = known[1][0]
    return lines.id_of(code, line)
