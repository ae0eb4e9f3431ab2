"""Finds profiler traces in folders, glob patterns, files and URLs, and recognises them by name and content."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import msgspec

from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import FilesBelow, closed_folders, files_below, listed, ranks_in_words, reason_of
from ddpdoctor.trace.formats import Candidate, failed_formats, file_of, is_trace, parts_of
from ddpdoctor.trace.sources import expand_url, is_url, rank_of_name

_PARALLEL_REQUESTS = 16
"""Parallel requests to an object store. Each takes some ten milliseconds regardless of its size."""
_MAX_NAMED = 3
"""Most files that a message lists."""


class TraceSet(msgspec.Struct, frozen=True):
    """Sorted files with profiler traces, and sentences on skipped files. A file with several ranks has one address per rank
    (:func:`parts_of`)."""

    files: tuple[str, ...]
    notes: tuple[str, ...] = ()


def find_traces(paths: Sequence[str], below: Mapping[str, FilesBelow] | None = None) -> TraceSet:
    """The traces at ``paths``: folders, glob patterns, files, URLs.

    Files named directly are always included; in folders and patterns, files that are not traces are skipped. ``below``: files of
    folders that were listed already. Raises :class:`UnusableInput` if a path does not exist or no trace is found.
    """
    files: dict[str, None] = {}
    ignored: list[str] = []
    notes: list[str] = []
    failures: list[str] = []
    for path in paths:
        inside = _expand(path, notes, below or {})
        if inside == [path]:
            files.update(dict.fromkeys(parts_of(Candidate(path))))
            continue
        look = partial(_traces_of, failures=failures)
        found: Iterator[Sequence[str]] = map(look, inside)
        if is_url(path):
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(_PARALLEL_REQUESTS) as heads:
                found = heads.map(look, inside)
        for file, parts in zip(inside, found, strict=True):
            files.update(dict.fromkeys(parts))
            if not parts and file.endswith((".json", ".json.gz", ".json.zst")):
                ignored.append(file)
    if failures:
        notes.append(failed_formats(failures))
    if not files:
        without_events = f"{len(ignored)} JSON file(s) hold no profiler events"
        such_as = f"; {without_events}: {_named(ignored)}" if ignored else ""
        nothing = (
            f"No profiler trace in {', '.join(paths) or 'an empty list of paths'}: "
            "expected torch.profiler's .json, .json.gz or .json.zst files, .sqlite files that Nsight Systems exported, or, to "
            "analyze, a run directory of ddpdoctor or dumps of torch's flight recorder"
            f"{such_as}."
        )
        raise UnusableInput(" ".join([nothing, *notes]))
    if ignored:
        many = f"{len(ignored)} JSON file(s)"
        notes.append(f"{many} hold no profiler events and were skipped: {_named(ignored)}.")
    return TraceSet(tuple(files), tuple(notes))


def _traces_of(file: str, failures: list[str]) -> Sequence[str]:
    """Paths to read for a file; empty if it is not a trace. Adds to ``failures`` those of formats that could not inspect it."""
    candidate = Candidate(file)
    parts = parts_of(candidate) if is_trace(candidate) else ()
    failures += candidate.failures
    return parts


def _named(files: Sequence[str]) -> str:
    """Text with the names of the first ``files``, and the ranks of the others if their names contain them."""
    shown, others = files[:_MAX_NAMED], [rank_of_name(file) for file in files[_MAX_NAMED:]]
    ranks = [rank for rank in others if rank is not None]
    if not others or len(ranks) < len(others):
        return listed(files)
    return f"{', '.join(shown)} and those of {ranks_in_words(ranks)}"


def _expand(path: str, notes: list[str], below: Mapping[str, FilesBelow]) -> list[str]:
    if is_url(path):
        return expand_url(path)
    try:
        kind = os.stat(file_of(path)).st_mode  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        kind = None
    except OSError as error:
        raise _unreadable(path, error) from None
    if kind is not None and stat.S_ISDIR(kind):
        found, errors = below.get(path) or files_below(path)
        for one in errors:
            if one.filename in (None, path):
                raise _unreadable(path, one)
        notes += closed_folders(errors)
        return _files(found, notes)
    if kind is not None and not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
        raise UnusableInput(f"{path} is a device or a socket, not a file.")
    if kind is not None:
        return [path]
    matches = _files(sorted(glob.glob(path, recursive=True)), notes)  # noqa: PTH207
    if not matches:
        nothing = f"{path} does not exist, nor does a file match it as a pattern."
        raise UnusableInput(" ".join([nothing, *notes]))
    return matches


def _files(paths: Sequence[str], notes: list[str]) -> list[str]:
    """The ``paths`` that are files or links to files. Adds a note on those that are neither files nor folders."""
    found, unreadable = [], []
    for path in paths:
        try:
            kind = os.stat(path).st_mode  # noqa: PTH116
        except OSError as error:
            unreadable.append(f"{path} ({reason_of(error).lower()})")
            continue
        if stat.S_ISREG(kind):
            found.append(path)
        elif not stat.S_ISDIR(kind):
            unreadable.append(f"{path} ({'a FIFO' if stat.S_ISFIFO(kind) else 'a device or a socket'})")
    if unreadable:
        notes.append(f"Skipped, as no regular files that can be read: {listed(unreadable)}.")
    return found


def _unreadable(path: str, error: OSError) -> UnusableInput:
    return UnusableInput(f"{path} cannot be read: {reason_of(error).lower()}.")
