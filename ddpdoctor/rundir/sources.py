"""Hashes of the user's source files at the time of the run. A report shows a line's text only if the file is unchanged.

A source file must be a regular file of this user or root, not a link, and of limited size. Because a run directory may come from
anyone, the file must also have the recorded hash, not only the name.
"""

from __future__ import annotations

import ast
import errno
import hashlib
import json
import os
import warnings
from collections.abc import Iterable
from contextlib import suppress

from .files import bounded_lines, folders_in, open_regular, reading, write_json
from .layout import SAMPLES_FILE, WORKERS_FILE, host_directory
from .notes import Note
from .stepevents import LineField
from .stops import document_in
from .typed import Check

SOURCES_FILE = "sources.json"
SOURCES_SCHEMA = "ddpdoctor.sources/1"
MOST_SOURCE_BYTES = 4 << 20
"""Upper limit of a source file; a larger one was generated."""
_MOST_FILES = 500
"""Upper limit of the files per host."""
_MOST_READ_BYTES = 64 << 20
"""Upper limit of the bytes read of one rank's samples. Lines are defined before they are first used, most of them in the first
minute."""
_FIELDS: dict[str, Check] = {"files": lambda value: isinstance(value, dict)}
_LOST = "the source lines of this host's ranks are named without their text"
_DEFINES = f"{{{LineField.WHERE.key}".encode()


def source_bytes(path: str) -> bytes:
    """Read a source file. Raises OSError if it cannot be read or is not trusted."""
    if not os.path.isabs(path):
        raise OSError(errno.EINVAL, "its path is not absolute", path)
    with os.fdopen(open_regular(path), "rb") as source:
        status = os.fstat(source.fileno())
        if status.st_uid not in (os.geteuid(), 0):
            raise OSError(errno.EPERM, "it belongs to another user", path)
        if status.st_size > MOST_SOURCE_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        return source.read(MOST_SOURCE_BYTES)


def hash_of(data: bytes) -> str:
    """SHA-256 of a file's content."""
    return hashlib.sha256(data).hexdigest()


def parsed_python(text: str) -> ast.Module | None:
    """The syntax tree of a script; None if it does not parse. Python's warnings about it are not printed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def note_sources(run: str, host: str, ranks: Iterable[str], started_ns: int) -> None:
    """Write the hashes of the files that were sampled in ranks of this host; ``ranks`` are their folders. A file changed since
    ``started_ns`` may differ from the one that ran, so its hash is None. Raises OSError."""
    files: dict[str, str | None] = {}
    for folder in ranks:
        sampled = [os.path.join(folder, name) for name in (SAMPLES_FILE, WORKERS_FILE)]
        for path in (path for file in sampled for path in _sampled_files(file)):
            if path not in files and len(files) < _MOST_FILES:
                try:
                    files[path] = _hash_from_before(path, started_ns)
                except (OSError, ValueError):
                    continue
    if files:
        folder = host_directory(run, host)
        os.makedirs(folder, exist_ok=True)
        write_json(os.path.join(folder, SOURCES_FILE), {"schema": SOURCES_SCHEMA, "files": files})


def _hash_from_before(path: str, started_ns: int) -> str | None:
    data = source_bytes(path)
    status = os.lstat(path)
    return hash_of(data) if max(status.st_mtime_ns, status.st_ctime_ns) < started_ns else None


def _sampled_files(samples: str) -> list[str]:
    """Files with sampled lines, in the order in which they were first seen."""
    found: dict[str, None] = {}
    with suppress(OSError, ValueError), reading(samples) as source:
        for line in bounded_lines(source):
            if source.tell() > _MOST_READ_BYTES:
                break
            if line.startswith(_DEFINES):
                try:
                    path = json.loads(line).get(LineField.FILE.value)
                except (ValueError, AttributeError, RecursionError):
                    continue
                if isinstance(path, str) and path.startswith("/") and "\0" not in path:
                    found[path] = None
    return list(found)


def read_sources(run: str, notes: list[Note] | None = None) -> list[dict[str, str | None]]:
    """Hashes by path, for each host of a run. Problems are added to ``notes``. Never raises."""
    hosts = os.path.join(run, "hosts")
    try:
        names = folders_in(hosts)
    except OSError:
        return []
    found_notes: list[Note] = [] if notes is None else notes
    documents = [
        document_in(os.path.join(hosts, name), SOURCES_FILE, SOURCES_SCHEMA, _FIELDS, found_notes, _LOST)
        for name in names
    ]
    return [
        {path: hashed if isinstance(hashed, str) else None for path, hashed in document["files"].items()}
        for document in documents
        if document is not None and document.get("files") is not None
    ]
