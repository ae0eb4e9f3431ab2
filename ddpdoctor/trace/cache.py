"""Caches parsed traces in the user's cache folder, so that a second analysis of the same file skips parsing.

The key is a hash of the file's whole content (of a URL: of its entity tag or checksum) and of the code of all readers. An entry is
written to a temporary file and renamed, so several processes may share the folder. An invalid or unreadable entry is ignored and written
again. Folders and entries that another user can write to are not used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

import ddpdoctor
from ddpdoctor.cachefolder import cache_folder, is_private, keep_newest, make_private, open_private
from ddpdoctor.rundir import is_hollow
from ddpdoctor.trace import formats
from ddpdoctor.trace.archive import SCHEMA, is_archive, read_archive, relocated, write_archive
from ddpdoctor.trace.columns import RankTrace
from ddpdoctor.trace.formats import file_of, load_trace
from ddpdoctor.trace.sources import content_tag, is_url, open_local
from ddpdoctor.written import replace_file

_SUFFIX = ".cached"
LIMIT_BYTES = 8 << 30
"""Limit of the size of all entries; the least recently used ones are removed."""
_written_bytes = float("inf")
"""Bytes that this process has written since it last removed old entries; infinite before its first entry."""


def cached_load(path: str, rank: int | None = None) -> RankTrace:
    """Like :func:`load_trace`, but reads the file from the cache, or adds it.

    A URL is cached only if its store gives an entity tag or checksum. Digests, which are columns already, and pipes are not cached. Errors
    of the cache are ignored.
    """
    is_pipe = not (is_url(path) or Path(file_of(path)).is_file())  # or a missing file
    if is_archive(path) or is_pipe:
        return load_trace(path, rank)
    try:
        before = _file_version(path)
        entry = _entry(path, before) if before is not None else None
    except (OSError, RuntimeError):
        # Unreadable, or no home folder. load_trace raises the error, if any.
        entry = None
    if entry is None:
        return load_trace(path, rank)
    trace = _read(entry)
    if trace is None:
        # The entry has the rank that the file itself states, not the caller's ``rank``.
        trace = load_trace(path)
        with contextlib.suppress(OSError):
            if _file_version(path) == before:  # the file has not changed since it was hashed
                _write(entry, trace)
    return replace(trace, meta=relocated(trace.meta, path, rank))


def _file_version(path: str) -> str | None:
    if is_url(path):
        return content_tag(path)
    status = Path(file_of(path)).stat()
    if is_hollow(status):
        return None
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


def _entry(path: str, version: str) -> Path:
    digest = _code_hash(tuple(formats.__path__)).copy()
    if is_url(path):
        digest.update(f"\0{version}".encode())
    else:
        file = file_of(path)
        digest.update(path[len(file) :].encode())  # the part of the address that selects one of several ranks
        with open_local(file) as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return cache_folder("traces") / f"{digest.hexdigest()}{_SUFFIX}"


@functools.cache
def _code_hash(folders: Sequence[str]) -> hashlib.blake2b:
    """Hash of the code that reads traces: the formats in ``folders``, and what they share. Raises OSError if it cannot be read."""
    digest = hashlib.blake2b(f"{SCHEMA} {ddpdoctor.__version__}".encode(), digest_size=20)
    for file in (
        *sorted(Path(__file__).parent.glob("*.py")),
        *(f for top in folders for f in sorted(Path(top).rglob("*.py"))),
    ):
        content = file.read_bytes()
        digest.update(f"\0{file.name} {len(content)} ".encode() + content)
    return digest


def _read(entry: Path) -> RankTrace | None:
    try:
        if not is_private(entry.parent):
            return None
        with open_private(entry) as stream:
            trace = read_archive(stream, str(entry))
        os.utime(entry)
        return trace
    except Exception:  # missing or damaged, which may raise any error; the entry is written again
        return None


def _write(entry: Path, trace: RankTrace) -> None:
    global _written_bytes
    if not make_private(entry.parent):
        return
    replace_file(entry, lambda stream: write_archive(stream, trace))
    _written_bytes += entry.lstat().st_size
    if _written_bytes > LIMIT_BYTES // 64:
        _written_bytes = 0
        keep_newest(entry.parent, _SUFFIX, max_bytes=LIMIT_BYTES)
