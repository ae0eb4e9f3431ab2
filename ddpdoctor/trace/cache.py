"""Columns kept between runs, in the user's cache folder: a second analysis of the same file does not read its format.

An entry is found by a hash of the file's whole content (of a URL: of what its store has instead), so it is never another
file's; it is written aside and renamed into place, so readers and writers may share the folder; one that cannot be read,
or holds what no trace has, is ignored and made again. Folders and entries that somebody else may have written are not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from msgspec.structs import replace

import ddpdoctor
from ddpdoctor.cachefolder import cache_folder, is_own, keep_newest, make_own, open_own
from ddpdoctor.rundir import is_hollow
from ddpdoctor.trace.columns import SCHEMA, RankTrace, is_archive, placed, read_archive, write_archive
from ddpdoctor.trace.formats import file_of, load_trace
from ddpdoctor.trace.sources import content_tag, is_url, open_binary
from ddpdoctor.written import replace_file

_LAYOUT = 3
"""Raised whenever entries made before must not be read, though their schema is the same."""
_SUFFIX = ".cached"
LIMIT_BYTES = 8 << 30
"""The least recently used entries go beyond this size."""
_unchecked_bytes = float("inf")
"""Kept by this process since it last looked at the size of all; before its first entry, anything may be there."""


def cached_load(path: str, rank: int | None = None) -> RankTrace:
    """As :func:`load_trace`, from the cache where it holds this file's columns, and into it where it does not.

    A URL is kept where its store tells when the content changes, else it is always read. A digest holds columns
    already. Trouble with the cache is never an error.
    """
    read_once = not (is_url(path) or Path(file_of(path)).is_file())  # what a FIFO gives
    if is_archive(path) or read_once:
        return load_trace(path, rank)
    try:
        before = _version(path)
        entry = _entry(path, before) if before is not None else None
    except (OSError, RuntimeError):
        # Unreadable, or no home folder: load_trace says what is wrong, if anything is.
        entry = None
    if entry is None:
        return load_trace(path, rank)
    trace = _read(entry)
    if trace is None:
        # What is kept says of which rank the file itself says that it is, whatever the caller knows besides.
        trace = load_trace(path)
        with contextlib.suppress(OSError):
            if _version(path) == before:  # else it was written to since the hash was taken
                _write(entry, trace)
    return replace(trace, meta=placed(trace.meta, path, rank))


def _version(path: str) -> str | None:
    if is_url(path):
        return content_tag(path)
    status = Path(file_of(path)).stat()
    if is_hollow(status):
        return None
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


def _entry(path: str, version: str) -> Path:
    digest = hashlib.blake2b(f"{_LAYOUT} {SCHEMA} {ddpdoctor.__version__}".encode(), digest_size=20)
    if is_url(path):
        digest.update(f"\0{version}".encode())
    else:
        file = file_of(path)
        digest.update(path[len(file) :].encode())  # which of several ranks
        with open_binary(file) as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return cache_folder("traces") / f"{digest.hexdigest()}{_SUFFIX}"


def _read(entry: Path) -> RankTrace | None:
    try:
        if not is_own(entry.parent):
            return None
        with open_own(entry) as stream:
            trace = read_archive(stream, str(entry))
        os.utime(entry)
        return trace
    except Exception:  # not there, or damaged, which can fail in any layer: it will be made again
        return None


def _write(entry: Path, trace: RankTrace) -> None:
    global _unchecked_bytes
    if not make_own(entry.parent):
        return
    replace_file(entry, lambda stream: write_archive(stream, trace))
    _unchecked_bytes += entry.lstat().st_size
    if _unchecked_bytes > LIMIT_BYTES // 64:
        _unchecked_bytes = 0
        keep_newest(entry.parent, _SUFFIX, most_bytes=LIMIT_BYTES)
