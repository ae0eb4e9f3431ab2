"""Lines of the user's program, as findings name them: file and line, callers, and text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from ddpdoctor.rundir.packages import is_well_known

_is_framework = lru_cache(maxsize=4096)(is_well_known)


class CodeLine(msgspec.Struct, frozen=True):
    """A line of the user's program."""

    file: str
    line: int
    function: str


Stack = tuple[CodeLine, ...]
"""Lines of the user's program, each called by the next: the innermost first. Among them may be the framework's function that runs the
training loop and calls the user's hooks."""


def place_in_loop(files: Sequence[str]) -> int:
    """By the files of a line and its callers, the position of the outermost line in the training loop: the outermost that a framework's
    loop calls, or the outermost of all."""
    loop = None if _is_framework(files[0]) else loop_in(files[1:])
    return len(files) - 1 if loop is None else loop


def loop_in(files: Sequence[str]) -> int | None:
    """By the files of a user's line's callers, the position of the outermost framework's loop that calls a line of the user's; None
    without one. In an evaluation that a hook starts, that is the loop of the training, which calls the hook."""
    loops = [_is_framework(file) for file in files]
    called = [place for place, is_loop in enumerate(loops) if is_loop and not (place and loops[place - 1])]
    return called[-1] if called else None


class SourceText(msgspec.Struct, frozen=True):
    """A line's text as the run had it, with some lines around it."""

    first_line: int
    lines: list[str] = []
    call: str | None = None
    """Text of the line that calls it: of its callers the outermost one in the training loop, or the line itself; without indentation."""


class Where(CodeLine, frozen=True):
    """A line at which a cause was found."""

    share: float | None = None
    """Share of the samples or events of this cause that point to this line."""
    samples: int | None = None
    """Stack samples of this kind of work at this line, or below it, on these ranks in these steps; null where it is known from recorded
    calls alone, or from frames of a profile."""
    python_ms: float | None = None
    """Time per step that stack samples find at this line outside torch: neither in its operators nor in its own Python. Mean over the
    ranks and steps concerned; null where the line was not sampled often enough, or, for host work, calls a forward or backward pass or the
    optimizer."""
    callers: Stack = ()
    """The user's lines from which it was called, the nearest first, without lines of libraries other than the function of a framework
    whose training loop calls the user's hooks. As many as distinguish this way to the line from others that were seen; none where no
    caller was recorded."""
    text: SourceText | None = None
    """Text of the line, where the file could be read at the analysis and is as it was in the run."""
    text_missing: str | None = None
    """Why there is no text although the file exists; null where it was not read."""
    through: Stack = ()
    """Lines of a framework between this line and torch, the innermost first; none where the line calls torch itself."""
    process: str | None = None
    """Which process ran it, as "worker 3 of rank 1", or "workers" of all ranks; null: the rank itself."""
    inside: CodeLine | None = None
    """Line of a library that most of the samples at this line were in, which says what it calls; null where there is no such line."""
    follows: bool = False
    """Whether most of its samples show the line that ran next: the time was spent just before it, in Python code that holds the GIL for
    less than 5 ms at a time, which no sample can show."""
    more_callers: int = 0
    """Other call paths to the line, each of which takes a notable part of the time; 0 where none was seen."""

    @property
    def way(self) -> Stack:
        """The line and its callers."""
        return (self, *self.callers)

    @property
    def call(self) -> CodeLine:
        """The outermost line of the way that is in the training loop."""
        return self.way[place_in_loop([line.file for line in self.way])]

    @property
    def stack(self) -> Stack:
        """The line and its callers without the measurements, so that equal places compare equal."""
        return (CodeLine(self.file, self.line, self.function), *self.callers)

    def called_from(self, callers: Stack, more: int = 0) -> Where:
        """The same line, with its callers, and how many other ways lead to it."""
        return msgspec.structs.replace(self, callers=callers, more_callers=more)
