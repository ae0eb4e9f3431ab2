"""Which files are profiler traces: folders, patterns, single files and URLs, recognised by content."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import reason_of
from ddpdoctor.trace.formats import is_trace, parts_of
from ddpdoctor.trace.sources import expand_url, is_url

_AT_ONCE = 16
"""Requests to a store whose answers are waited for together: each takes some ten milliseconds, whatever it brings."""
_MOST_NAMED = 3
"""Files that are named of those that were passed over."""


class TraceSet(msgspec.Struct, frozen=True):
    """Files that hold profiler traces, in sorted order, a file of several ranks once for each (:func:`parts_of`); and what was left
    out on the way, a sentence each."""

    files: tuple[str, ...]
    notes: tuple[str, ...] = ()


def find_traces(paths: Sequence[str]) -> TraceSet:
    """The traces that ``paths`` (folders, glob patterns, files, URLs) stand for.

    A file that is named itself is taken as it is; in folders and patterns, other JSON and other files are
    passed over. Raises :class:`UnusableInput` where a path does not exist or no trace is found.
    """
    files: dict[str, None] = {}
    ignored: list[str] = []
    notes: list[str] = []
    for path in paths:
        listed = _expand(path, notes)
        if listed == [path]:
            files[path] = None
            continue
        traces = _traces_among(listed, at_once=is_url(path))
        others = sorted(set(listed) - set(traces))
        ignored += [file for file in others if file.endswith((".json", ".json.gz", ".json.zst"))]
        files.update(dict.fromkeys(traces))
    if not files:
        raise UnusableInput(
            f"No profiler trace in {', '.join(paths) or 'an empty list of paths'}: "
            "expected torch.profiler's .json, .json.gz or .json.zst files, or .sqlite files that Nsight Systems exported"
            f"{_such_as(ignored)}."
        )
    if ignored:
        many = f"{len(ignored)} JSON file(s)"
        notes.append(f"{many} hold no profiler events and were skipped{_named(ignored)}.")
    return TraceSet(tuple(part for file in files for part in parts_of(file)), tuple(notes))


def _traces_among(files: Sequence[str], at_once: bool) -> list[str]:
    if not at_once:
        return [file for file in files if is_trace(file)]
    with ThreadPoolExecutor(_AT_ONCE) as heads:
        return [file for file, is_one in zip(files, heads.map(is_trace, files), strict=True) if is_one]


def _named(ignored: Sequence[str]) -> str:
    more = len(ignored) - _MOST_NAMED
    return f": {', '.join(ignored[:_MOST_NAMED])}" + (f" and {more} more" if more > 0 else "")


def _such_as(ignored: Sequence[str]) -> str:
    return f"; {len(ignored)} JSON file(s) hold no profiler events{_named(ignored)}" if ignored else ""


def _expand(path: str, notes: list[str]) -> list[str]:
    if is_url(path):
        return expand_url(path)
    try:
        kind = os.stat(path).st_mode  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        kind = None
    except OSError as error:
        raise _unreadable(path, error) from None
    if kind is not None and stat.S_ISDIR(kind):
        return sorted(_files_below(path, notes))
    if kind is not None and not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
        raise UnusableInput(f"{path} is a device or a socket, not a file.")
    if kind is not None:
        return [path]
    matches = sorted(f for f in glob.glob(path, recursive=True) if Path(f).is_file())  # noqa: PTH207
    if not matches:
        raise UnusableInput(f"{path} does not exist, and matches no file as a pattern.")
    return matches


def _files_below(folder: str, notes: list[str]) -> Iterator[str]:
    def unreadable(error: OSError) -> None:
        place = str(error.filename or folder)
        if place == folder:
            raise _unreadable(place, error)
        notes.append(f"{_unreadable(place, error)}")

    for parent, folders, files in os.walk(folder, followlinks=False, onerror=unreadable):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for file in files:
            if not file.startswith(".") and Path(parent, file).is_file():
                yield str(Path(parent, file))


def _unreadable(path: str, error: OSError) -> UnusableInput:
    return UnusableInput(f"{path} cannot be read: {reason_of(error).lower()}.")
