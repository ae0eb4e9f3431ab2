"""Source lines: which frame of a stack is the user's, and a number for each line, written down once."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from types import CodeType, FrameType
from typing import Any, Callable, TypeVar

from ...rundir import EventField, LineField
from ...rundir.packages import is_training_loop, is_well_known

T = TypeVar("T")

USER, LIBRARY, HIDDEN, WELL_KNOWN = 0, 1, 2, 3
"""Kinds of code: the user's; an installed package, which may be the job itself; torch, the standard library and the
hook; an installed package that many jobs use, and the few lines that start a command."""
MOST_FRAMES = 200
"""Frames of a stack that are read: deeper recursion is not the training loop's."""
_MOST_LINES = 20_000
"""Source lines, and places in code, that are cached, some 200 bytes each: no script steps on as many, but code
generated at run time may."""
_MOST_CALLERS = 8
"""Callers of the innermost user frame that are written; in a recursion, the last calls."""
_MOST_THROUGH = 48
"""Lines of well-known packages between the user's line and torch that are written: a training loop's are some 20."""
_WHERE = EventField.WHERE.next_key
Place = tuple[CodeType, int]
"""A line of code."""


def _folders() -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Path prefixes of hidden files and of installed packages, and the folder of installed commands."""
    paths = sysconfig.get_paths()
    hook = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    torch = sys.modules.get("torch")
    hidden = [hook, paths["stdlib"], paths["platstdlib"], os.path.dirname(os.__file__)]
    if torch is not None and torch.__file__:
        hidden.append(os.path.dirname(torch.__file__))
    library = paths["purelib"], paths["platlib"]
    return (
        tuple({path + os.sep for path in hidden}),
        tuple({path + os.sep for path in library}),
        paths["scripts"] + os.sep,
    )


class CodeKinds:
    """Classifies code by its file name: the user's, a library's, or hidden."""

    def __init__(self) -> None:
        self._hidden, self._library, self._commands = _folders()
        self._known: dict[str, int] = {}
        self.by_code: dict[int, int] = {}
        """Kinds of code objects by id, filled on the training thread: hashing a code object would hash its
        constants."""
        self.met: list[CodeType] = []
        """Those code objects, which keep their ids."""

    def of(self, code: CodeType) -> int:
        """USER, LIBRARY, HIDDEN or WELL_KNOWN."""
        name = code.co_filename
        kind = self._known.get(name)
        if kind is None:
            kind = self._known[name] = self._classify(name)
        return kind

    def cached_kind(self, code: CodeType) -> int:
        """The kind of ``code``, cached for this code object."""
        kind = self.of(code)
        if len(self.met) < _MOST_LINES:
            self.met.append(code)
            self.by_code[id(code)] = kind
        return kind

    def _classify(self, name: str) -> int:
        if "/site-packages/" in name or "/dist-packages/" in name:
            if "/site-packages/torch/" in name or "/dist-packages/torch/" in name:
                return HIDDEN
            return WELL_KNOWN if is_well_known(name) else LIBRARY
        if name.startswith(self._library):
            return HIDDEN if name.startswith(self._hidden) and "/torch/" in name else LIBRARY
        if name.startswith(self._commands) or name == "<string>":
            # The latter is ``python -c``, but also spawned children, and methods that dataclasses write for themselves.
            return WELL_KNOWN
        if name.startswith(self._hidden) or (
            name.startswith("<") and not name.startswith(("<stdin", "<ipython"))
        ):
            return HIDDEN
        return USER

    def innermost(self, stack: Iterable[tuple[CodeType, T]]) -> T | None:
        """Of pairs of code and an item, innermost first: the item of the user's innermost code; without any, that of
        an installed package, and that of a well-known package last."""
        library = well_known = None
        for code, item in stack:
            kind = self.of(code)
            if kind == USER:
                return item
            if kind == LIBRARY and library is None:
                library = item
            elif kind == WELL_KNOWN and well_known is None:
                well_known = item
        return well_known if library is None else library

    def of_user(self, stack: Iterable[tuple[CodeType, T]]) -> list[T]:
        """Items of all of the user's frames, innermost first, and of the frameworks' training loops that call them; without any,
        those of installed packages."""
        found: dict[int, list[T]] = {USER: [], LIBRARY: [], WELL_KNOWN: []}
        for code, item in stack:
            kind = self.of(code)
            if kind in found:
                found[kind].append(item)
            if kind == WELL_KNOWN and found[USER] and is_training_loop(code.co_filename, code.co_name):
                found[USER].append(item)
        return found[USER] or found[LIBRARY] or found[WELL_KNOWN]

    def user_frame(self, frame: FrameType | None) -> FrameType | None:
        """The user's innermost frame in the stack that ends in ``frame``, chosen as in ``innermost``."""
        return self.innermost((each.f_code, each) for each in islice(_stack(frame), MOST_FRAMES))

    def through(self, frame: FrameType | None, users: FrameType) -> tuple[Place, ...]:
        """Lines of well-known packages in the stack that ends in ``frame``, through which ``users`` came there, the innermost first; none
        beyond another installed package, whose own call it then is. All of them if ``users`` is one of them, as nothing of the user's
        called it: a framework's own command."""
        found: list[Place] = []
        own = self.of(users.f_code) == WELL_KNOWN
        for each in islice(_stack(frame), MOST_FRAMES):
            kind = self.of(each.f_code)
            if (each is users and not own) or kind == LIBRARY or len(found) == _MOST_THROUGH:
                break
            if kind == WELL_KNOWN:
                found.append((each.f_code, each.f_lineno))
        return tuple(found)


def _stack(innermost: FrameType | None) -> Iterator[FrameType]:
    frame = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


def place_of(code: CodeType, line: int | None) -> list[Any]:
    """[file, line, function] of a line of ``code``."""
    name = code.co_filename
    file = name if name.startswith("<") else os.path.abspath(name)
    return [file, line, getattr(code, "co_qualname", code.co_name)]


class Lines:
    """Numbers of source lines. A line's definition goes to ``define`` (one JSON line) before its number is first used."""

    def __init__(self, kinds: CodeKinds, define: Callable[[str], None]) -> None:
        self._kinds = kinds
        self._define = define
        self._ids: dict[tuple[Any, ...], int] = {}
        """By id of the code, line, number of the calling line, and the same of lines between it and torch: to hash code is to hash its
        constants."""
        self._codes: list[CodeType] = []
        """Those of ``_ids``, which keep their ids."""
        self._texts: dict[tuple[int, int, int], str] = {}
        """By id of the code and bytecode offset, and a hash of those of well-known packages in the stack."""

    def id_of(
        self, code: CodeType, line: int, caller: int | None = None, through: Sequence[Place] = ()
    ) -> int | None:
        """The number of this line, called from the line with the number ``caller``, and from which torch was called ``through`` other
        lines; None once there are too many of them."""
        key = (id(code), line, caller, *[(id(each), at) for each, at in through])
        known = self._ids.get(key)
        if known is not None:
            return known
        if len(self._ids) >= _MOST_LINES:
            return None
        known = self._ids[key] = len(self._ids)
        self._codes += [code, *(each for each, _ in through)]
        fields = LineField.FILE, LineField.LINE, LineField.FUNCTION
        document: dict[str, Any] = {LineField.WHERE: known, **dict(zip(fields, place_of(code, line)))}
        if caller is not None:
            document[LineField.CALLER] = caller
        if through:
            document[LineField.THROUGH] = [place_of(each, at) for each, at in through]
        self._define(json.dumps(document, separators=(",", ":")) + "\n")
        return known

    def of_frame(self, frame: FrameType | None) -> int | None:
        """The number of the user's line in the stack that ends in ``frame``; None where no frame of it is."""
        users = self._kinds.user_frame(frame)
        return None if users is None else self.id_of(users.f_code, users.f_lineno)

    def of_stack(self, stack: Sequence[tuple[CodeType, int]]) -> int | None:
        """The number of the user's line in a stack of (code, line), innermost first; its callers among the user's
        lines are defined as well. None if there is none."""
        number: int | None = None
        for code, line in reversed(
            self._kinds.of_user((place[0], place) for place in stack)[: _MOST_CALLERS + 1]
        ):
            number = self.id_of(code, line, number)
        return number

    def caller(self, through: bool = False) -> str:
        """The field of an event that names the line of the user's code from which torch was called, or nothing. ``through``: a line has
        a number for each way through well-known packages by which it comes to torch."""
        # The same as of_frame, in one piece: this is called several times in every step.
        frame: FrameType | None = sys._getframe(2)
        library: FrameType | None = None
        well_known: FrameType | None = None
        kinds = self._kinds.by_code
        way = 0
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code))
            if kind is None:
                kind = self._kinds.cached_kind(code)
            if kind == USER:
                break
            if kind == LIBRARY:
                library = library or frame
            elif kind == WELL_KNOWN:
                well_known = well_known or frame
                if through and library is None:
                    way = hash((way, id(code), frame.f_lasti))
            frame = frame.f_back
        users = frame or library or well_known
        if users is None:
            return ""
        # f_lasti is at hand; f_lineno is looked up in the code's line table each time.
        key = id(users.f_code), users.f_lasti, way
        known = self._texts.get(key)
        if known is None:
            places = self._kinds.through(sys._getframe(2), users) if way else ()
            number = self.id_of(users.f_code, users.f_lineno, through=places)
            known = "" if number is None else f"{_WHERE}{number}"
            if len(self._texts) < _MOST_LINES and key[0] in kinds:
                self._texts[key] = known
        return known


def calling_frame() -> FrameType:
    """The caller's frame, for a source line."""
    return sys._getframe(1)
