"""Which formats there are, and which of them a file is of."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import stat
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol, cast

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace import formats
from ddpdoctor.trace.columns import RankTrace
from ddpdoctor.trace.sources import is_url, open_source

HEAD_BYTES = 1 << 16
"""Bytes of a file that are looked at: within them a trace says what it is, after the description of many devices too."""


class Candidate:
    """A file by its path (or URL), and by its first bytes if they are asked for."""

    def __init__(self, path: str) -> None:
        self.path = path

    @cached_property
    def head(self) -> bytes | None:
        """The first :data:`HEAD_BYTES` as they lie there; None where they cannot be read ahead, as from a pipe."""
        try:
            if not is_url(self.path) and not stat.S_ISREG(os.stat(self.path).st_mode):  # noqa: PTH116
                return None
            with open_source(self.path, ahead=False) as stream:
                return stream.read(HEAD_BYTES)
        except (OSError, UnusableInput):
            return None


_DEFAULT = "kineto"
"""What no other format recognises is read as this one, which says best what is wrong with it."""


class Format(Protocol):
    """What the door of each folder here has."""

    def recognises(self, candidate: Candidate) -> bool:
        """Whether the file is of this format, told by its name or its first bytes."""
        ...

    def read(self, path: str, rank: int | None) -> RankTrace:
        """The events of the file at ``path``, a local path or a URL.

        ``rank`` overrides what the file says. Raises :class:`UnusableInput` with one sentence, which names the file,
        where no event can be read.
        """
        ...


class MultiRankFormat(Protocol):
    """What the door of a format has besides whose files may hold several ranks."""

    def parts(self, candidate: Candidate) -> Sequence[str]:
        """An address for each rank in the file, which ``read`` takes; none where it holds one, or is no such file."""
        ...

    def file_of(self, path: str) -> str:
        """The file of which ``path`` is a part; ``path`` where it is none."""
        ...


def load_trace(path: str, rank: int | None = None) -> RankTrace:
    """Reads one profiler trace, of any format, from a local path or a URL that fsspec knows.

    ``rank`` overrides what the file says (a run directory knows better).
    Raises :class:`UnusableInput` with one sentence where no event can be read.
    """
    return _format_of(Candidate(path)).read(path, rank)


def is_trace(candidate: Candidate) -> bool:
    """Whether a file, by its name or its first bytes, is a profiler trace of any format."""
    return any(each.recognises(candidate) for each in _formats(tuple(formats.__path__)).values())


def parts_of(candidate: Candidate) -> Sequence[str]:
    """What is to be read of a file: an address for each of its ranks, where it holds several, else the file itself."""
    several = (each.parts(candidate) for each in _multi_rank_formats())
    return next(filter(None, several), (candidate.path,))


def file_of(path: str) -> str:
    """The file in which that lies which :func:`parts_of` gave."""
    return next((file for each in _multi_rank_formats() if (file := each.file_of(path)) != path), path)


def _multi_rank_formats() -> list[MultiRankFormat]:
    known = _formats(tuple(formats.__path__)).values()
    return [cast(MultiRankFormat, each) for each in known if hasattr(each, "parts")]


def _format_of(candidate: Candidate) -> Format:
    known = _formats(tuple(formats.__path__))
    for name, each in known.items():
        if name != _DEFAULT and each.recognises(candidate):
            return each
    return known[_DEFAULT]


@functools.cache
def _formats(folders: Sequence[str]) -> dict[str, Format]:
    """Each folder of ``folders`` that is a package, by its name: a format is one by being there."""
    named = [module.name for module in pkgutil.iter_modules(folders) if module.ispkg]
    return {name: cast(Format, importlib.import_module(f"{formats.__name__}.{name}")) for name in named}
