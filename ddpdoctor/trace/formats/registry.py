"""Discovers the trace formats and selects a file's format."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import stat
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace import formats
from ddpdoctor.trace.columns import RankTrace
from ddpdoctor.trace.sources import is_url, open_source

HEAD_BYTES = 1 << 16
"""Number of first bytes that ``recognises`` may inspect. Enough to include the text after the descriptions of many devices."""


class Candidate:
    """A file that may be a trace: its path or URL, and its first bytes, read on demand."""

    def __init__(self, path: str) -> None:
        self.path = path

    @cached_property
    def head(self) -> bytes | None:
        """The first :data:`HEAD_BYTES`, not decompressed; None if reading fails or would consume them, as for a pipe."""
        try:
            if not is_url(self.path) and not stat.S_ISREG(os.stat(self.path).st_mode):  # noqa: PTH116
                return None
            with open_source(self.path, read_ahead=False) as stream:
                return stream.read(HEAD_BYTES)
        except (OSError, UnusableInput):
            return None


_DEFAULT = "kineto"
"""Format of files that no format recognises. It has the best error messages."""


class Format(Protocol):
    """Interface of each format's module or package."""

    def recognises(self, candidate: Candidate) -> bool:
        """Whether the file is of this format, by its name or its first bytes."""
        ...

    def read(self, path: str, rank: int | None) -> RankTrace:
        """The events of the file at ``path``, a local path or a URL.

        ``rank`` overrides the file's own. Raises :class:`UnusableInput` with one sentence that names the file if no event can
        be read.
        """
        ...


class MultiRankFormat(Protocol):
    """Additional interface of a format whose files may have several ranks."""

    def parts(self, candidate: Candidate) -> Sequence[str]:
        """Address of each rank in the file, for ``read``; empty if the file has one rank or another format."""
        ...

    def file_of(self, path: str) -> str:
        """The file of the address ``path``; ``path`` itself if it is not an address."""
        ...


def load_trace(path: str, rank: int | None = None) -> RankTrace:
    """Reads one profiler trace of any format, from a local path or a URL that fsspec supports.

    ``rank`` overrides the file's own, for traces of a run directory. Raises :class:`UnusableInput` with one sentence if no
    event can be read.
    """
    candidate, known = Candidate(path), _formats()
    others = (each for name, each in known.items() if name != _DEFAULT and each.recognises(candidate))
    found: Format = next(others, known[_DEFAULT])
    return found.read(path, rank)


def is_trace(candidate: Candidate) -> bool:
    """Whether a file, by its name or its first bytes, is a profiler trace of any format."""
    return any(each.recognises(candidate) for each in _formats().values())


def parts_of(candidate: Candidate) -> Sequence[str]:
    """Paths to read for a file: the address of each rank if the file has several, else the file itself."""
    several = (each.parts(candidate) for each in _multi_rank_formats())
    return next(filter(None, several), (candidate.path,))


def file_of(path: str) -> str:
    """The file of a path that :func:`parts_of` returned."""
    return next((file for each in _multi_rank_formats() if (file := each.file_of(path)) != path), path)


def _multi_rank_formats() -> list[Any]:
    return [each for each in _formats().values() if hasattr(each, "parts")]


def _formats() -> dict[str, Any]:
    """All formats, by the name of their module or package."""
    return _formats_in(tuple(formats.__path__))


@functools.cache
def _formats_in(folders: Sequence[str]) -> dict[str, Any]:
    names = [f"{formats.__name__}.{module.name}" for module in pkgutil.iter_modules(folders)]
    return {name.rpartition(".")[2]: importlib.import_module(name) for name in names if name != __name__}
