"""Formats of profiler traces, one module or subpackage each, which reads a file into one rank's columns.

Each implements :class:`Format`: ``recognises`` identifies its files by name or first bytes, ``read`` returns their columns. If a file can
have several ranks, ``parts`` returns an address for each (:class:`MultiRankFormat`). Modules and subpackages here are found at run time;
there is no list of formats. A file that no format recognises is read as Kineto's JSON, whose reader gives the error message. An error in
one format affects only the files that it reads.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import stat
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol, TypeVar

from ddpdoctor.errors import DdpDoctorError, UnusableInput
from ddpdoctor.trace.columns import RankTrace
from ddpdoctor.trace.sources import is_url, open_source

T = TypeVar("T")

HEAD_BYTES = 1 << 16
"""Number of first bytes that ``recognises`` may inspect. Enough to include the text after the descriptions of many devices."""


class Candidate:
    """A file that may be a trace: its path or URL, and its first bytes, read on demand."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.failures: list[str] = []
        """The formats that could not inspect the file because of an error in their code, each with the error."""

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


def load_trace(path: str | os.PathLike[str], rank: int | None = None) -> RankTrace:
    """Reads one profiler trace of any format, from a local path or a URL that fsspec supports.

    ``rank`` overrides the file's own, for traces of a run directory. Raises :class:`UnusableInput` with one sentence if no
    event can be read.
    """
    path = os.fspath(path)
    candidate = Candidate(path)
    others = (name for name in _recognising(candidate) if name != _DEFAULT)
    name = next(others, _DEFAULT)
    try:
        trace = _formats()[name].read(path, rank)
        if not isinstance(trace, RankTrace):
            raise TypeError(f"read returned {type(trace).__name__} instead of RankTrace")
    except DdpDoctorError as error:
        if not candidate.failures:
            raise
        raise UnusableInput(f"{error} {failed_formats(candidate.failures)}") from None
    except (MemoryError, RecursionError):  # caused by the file, not by the reader
        raise
    except Exception as error:
        raise UnusableInput(
            f"{path} cannot be read: the reader of the format {_in_words(name, error)} failed."
        ) from error
    return trace


def is_trace(candidate: Candidate) -> bool:
    """Whether a file, by its name or its first bytes, is a profiler trace of any format."""
    return any(True for _ in _recognising(candidate))


def parts_of(candidate: Candidate) -> Sequence[str]:
    """Paths to read for a file: the address of each rank if the file has several, else the file itself."""
    several = (
        _inspect(candidate, name, functools.partial(each.parts, candidate), ())
        for name, each in _multi_rank_formats().items()
    )
    return next(filter(None, several), (candidate.path,))


def failed_formats(failures: Sequence[str]) -> str:
    """A sentence on formats that could not inspect files (:attr:`Candidate.failures`)."""
    different = list(dict.fromkeys(failures))
    return f"Not considered, because of errors in their readers: the format{'s' if len(different) > 1 else ''} {', '.join(different)}."


def file_of(path: str) -> str:
    """The file of a path that :func:`parts_of` returned. A format that fails is skipped; :func:`load_trace` reports it."""
    for each in _multi_rank_formats().values():
        with suppress(Exception):
            if (file := each.file_of(path)) != path:
                return str(file)
    return path


def _recognising(candidate: Candidate) -> Iterator[str]:
    """The names of the formats that recognise the file."""
    for name, each in _formats().items():
        if _inspect(candidate, name, functools.partial(each.recognises, candidate), False):
            yield name


def _inspect(candidate: Candidate, name: str, inspect: Callable[[], T], otherwise: T) -> T:
    """The result of ``inspect``, code of the format ``name``; ``otherwise``, and a failure of the candidate, after an error."""
    try:
        return inspect()
    except Exception as error:
        candidate.failures.append(_in_words(name, error))
        return otherwise


def _in_words(name: str, error: Exception) -> str:
    """The name of a format and an error in it, with the last of the formats' lines that it passed."""
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    passed = [
        (file, number) for file, number in lines if file != __file__ and file.startswith(tuple(__path__))
    ]
    where = f", in {passed[-1][0]}, line {passed[-1][1]}" if passed else ""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return f"{name} ({text}{where})"


def _multi_rank_formats() -> dict[str, Any]:
    return {name: each for name, each in _formats().items() if hasattr(each, "parts")}


class _UnusableFormat:
    """Stands for a format whose module cannot be imported: it fails for each file."""

    def __init__(self, error: Exception) -> None:
        self._error, self._traceback = error, error.__traceback__

    def recognises(self, _: Candidate) -> bool:
        raise self._error.with_traceback(self._traceback)  # without the places where it was raised before


def _formats() -> dict[str, Any]:
    """All formats, by the name of their module or package."""
    return _formats_in(tuple(__path__))


@functools.cache
def _formats_in(folders: Sequence[str]) -> dict[str, Any]:
    return {module.name: _imported(module.name) for module in pkgutil.iter_modules(folders)}


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except Exception as error:  # a syntax error, a missing package
        return _UnusableFormat(error)
