"""Which files are profiler traces: folders, patterns, single files and URLs, recognised by content."""

from __future__ import annotations

import glob
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import reason_of
from ddpdoctor.trace.archive import is_archive
from ddpdoctor.trace.remote import expand_url, is_url, open_url
from ddpdoctor.trace.source import GZIP, LFS_POINTER, ZSTD, open_binary

_SNIFFED_BYTES = 1 << 16
_NAMED = 3
"""Most files named of those that were passed over."""
_OWN = b'"otherData":{"producer":"ddpdoctor"'
"""What ``ddpdoctor export`` writes into a timeline: no recording, though it looks like a trace."""
_KEYS = (b'"traceEvents"', b'"baseTimeNanoseconds"', b'"deviceProperties"', b'"distributedInfo"')


@dataclass(frozen=True)
class TraceSet:
    """Files that hold profiler traces, in sorted order, and what was left out on the way, a sentence each."""

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
        found = _expand(path, notes)
        if found == [path]:
            files[path] = None
            continue
        traces = [file for file in found if is_trace(file)]
        others = sorted(set(found) - set(traces))
        ignored += [file for file in others if file.endswith((".json", ".json.gz", ".json.zst"))]
        files.update(dict.fromkeys(traces))
    if not files:
        raise UnusableInput(
            f"No profiler trace in {', '.join(paths) or 'an empty list of paths'}: "
            f"expected torch.profiler's .json, .json.gz or .json.zst files{_such_as(ignored)}."
        )
    if ignored:
        many = f"{len(ignored)} JSON file(s)"
        notes.append(f"{many} hold no profiler events and were passed over{_named(ignored)}.")
    return TraceSet(tuple(files), tuple(notes))


def _named(ignored: Sequence[str]) -> str:
    more = len(ignored) - _NAMED
    return f": {', '.join(ignored[:_NAMED])}" + (f" and {more} more" if more > 0 else "")


def _such_as(ignored: Sequence[str]) -> str:
    return f"; {len(ignored)} JSON file(s) hold no profiler events{_named(ignored)}" if ignored else ""


def is_trace(path: str) -> bool:
    """Whether a file is a digest by its name, or its first bytes are those of a profiler trace (or of a Git LFS
    pointer in a trace's place)."""
    if is_archive(path):
        return True
    named = ".json" in Path(path).name.lower()
    try:
        with open_url(path) if is_url(path) else open_binary(path) as stream:
            head = stream.read(_SNIFFED_BYTES)
    except (OSError, UnusableInput):
        return named
    if head.startswith((LFS_POINTER, ZSTD)):
        return named
    if head.startswith(GZIP):
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, _SNIFFED_BYTES)
        except zlib.error:
            return named
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"["):
        return b'"ph"' in text[:4096] or (named and not text[1:].strip(b" \t\r\n]"))
    if not text.startswith(b"{") or _OWN in text[:4096]:
        return False
    return any(key in text for key in _KEYS) or (len(head) == _SNIFFED_BYTES and "trace" in path.lower())


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
        raise UnusableInput(f"{path} does not exist, and no file matches it as a pattern.")
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
