"""Lines of the user's program that findings name: file and line, callers, and text."""

from __future__ import annotations

import re
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
"""Lines of the user's program, each called by the next; the innermost first. A framework's function that runs the training loop and
calls the user's hooks may be among them."""


def function_name(qualified: str) -> str:
    """A function's qualified name as reports show it: ``Trainer.fit.<lambda>`` for ``Trainer.fit.<locals>.<lambda>``, and a comprehension
    as part of its function."""
    return _COMPREHENSIONS.sub("", qualified).replace(".<locals>", "")


_COMPREHENSIONS = re.compile(r"(?:\.<locals>\.<(?:genexpr|\w+comp)>)+$")


def own_process(rank: int) -> str:
    """:attr:`Where.process` of a line that only one of the named ranks runs."""
    return f"{_OWN_PROCESS}{rank}"


def is_own_process(process: str | None) -> bool:
    """Whether a :attr:`Where.process` is of :func:`own_process`."""
    return (process or "").startswith(_OWN_PROCESS)


_OWN_PROCESS = "rank "


def place_in_loop(files: Sequence[str]) -> int:
    """Return the position of the outermost line in the training loop, given the files of a line and its callers: the outermost line
    that a framework's loop calls, else the outermost line."""
    loop = None if _is_framework(files[0]) else loop_in(files[1:])
    return len(files) - 1 if loop is None else loop


def loop_in(files: Sequence[str]) -> int | None:
    """Return the position of the outermost framework loop that calls a line of the user's, given the files of a user line's callers;
    None without one. In an evaluation that a hook starts, this is the training loop, which calls the hook."""
    loops = [_is_framework(file) for file in files]
    called = [place for place, is_loop in enumerate(loops) if is_loop and not (place and loops[place - 1])]
    return called[-1] if called else None


class SourceText(msgspec.Struct, frozen=True):
    """The text of a line at the time of the run, with some lines around it."""

    first_line: int
    lines: list[str] = []
    call: str | None = None
    """Text of the outermost caller in the training loop, or of the line itself; without indentation."""


class Where(CodeLine, frozen=True):
    """A line at which a cause was found."""

    share: float | None = None
    """Share of the samples or events of this cause that are at this line."""
    samples: int | None = None
    """Stack samples of this kind of work at or below this line, on these ranks in these steps; null if the line is known only from
    recorded calls or from frames of a profile."""
    others_share: float | None = None
    """Samples at or below this line with these callers, per time, on the other ranks relative to these ranks: about 0 if only these
    ranks run it, 1 if all ranks spend as much time there; null if unknown."""
    python_ms: float | None = None
    """Time per step at this line outside torch (neither in its operators nor in its Python code), from stack samples. Mean over the
    ranks and steps concerned; null if the line was not sampled often enough, or if host work at the line calls a forward or backward
    pass or the optimizer."""
    callers: Stack = ()
    """The user's lines that called it, the nearest first. Lines of libraries are excluded, except the function of a framework whose
    training loop calls the user's hooks. Only as many as distinguish this call path from the other recorded ones; none if no caller was
    recorded."""
    text: SourceText | None = None
    """Text of the line, if the file could be read during the analysis and is unchanged since the run."""
    text_missing: str | None = None
    """Why there is no text although the file exists; null if it was not read."""
    through: Stack = ()
    """Lines of a framework between this line and torch, the innermost first; none if the line calls torch itself."""
    process: str | None = None
    """The process that ran it: "worker 3 of rank 1", or "workers" of all ranks; "rank 1" if several ranks are named, each with its own
    line; else null."""
    inside: CodeLine | None = None
    """Library line that contains most of the samples at this line; null if there is none."""
    follows: bool = False
    """Whether most of its samples show the line that ran next: the time was spent just before it, in Python code that holds the GIL for
    less than 5 ms at a time, which no sample can show."""
    step_callers: int = 0
    """Number of the outermost ``callers`` that also call the forward or backward pass or the optimizer: they are calls of a whole step."""
    more_callers: int = 0
    """Number of other call paths to the line that each take a notable part of the time."""

    @property
    def call_path(self) -> Stack:
        """The line and its callers."""
        return (self, *self.callers)

    @property
    def call(self) -> CodeLine:
        """The outermost of these lines that is in the training loop and does not call a whole step."""
        path = self.call_path[: len(self.call_path) - self.step_callers]
        return path[place_in_loop([line.file for line in path])]

    @property
    def stack(self) -> Stack:
        """The line and its callers without measurements, for comparison."""
        return (CodeLine(self.file, self.line, self.function), *self.callers)

    def called_from(self, callers: Stack, more: int = 0) -> Where:
        """Return the line with these callers and ``more`` other call paths."""
        return msgspec.structs.replace(self, callers=callers, more_callers=more)
