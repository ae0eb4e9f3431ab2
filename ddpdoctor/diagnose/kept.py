"""What was made of files that hardly ever change, kept in the user's cache folder: rules that were read and checked,
the documentation of the facts. To make them anew takes longer than most analyses of a small trace.

An entry is found by a hash of everything that it depends on: the files' content, the code that reads and checks
them, and the packages that judge expressions and texts. It is data, never code, and only what is without a fault is
kept; an entry that cannot be read, or that somebody else may have written, is ignored and made again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

import ddpdoctor
from ddpdoctor.cachefolder import cache_folder, is_own, keep_newest, make_own, open_own
from ddpdoctor.written import replace_file

T = TypeVar("T")

_SUFFIX = ".msgpack"
_MOST_ENTRIES = 32
"""The least recently used entries go beyond this number: who edits rules makes one with each change."""
_CODE = (
    "diagnose/conditions.py",
    "diagnose/facts_view.py",
    "diagnose/kept.py",
    "diagnose/rule.py",
    "diagnose/words.py",
    "measure/facts.py",
    "measure/hangfacts.py",
    "measure/memoryfacts.py",
    "measure/runfacts.py",
    "measure/places.py",
    "measure/taxonomy.py",
)
_SUM_BYTES = 16
_PACKAGES = ("cel", "jinja2", "msgspec", "yaml")


class Kept(Generic[T]):
    """The place of what was made of ``contents`` (files by name), of type ``kind``. Trouble with the cache is no
    error."""

    def __init__(self, kind: type[T], contents: Mapping[str, bytes]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._entry: Path | None = None
        with contextlib.suppress(OSError, RuntimeError):  # no home folder; or installed where no files are
            self._entry = cache_folder("rules") / f"{_key(kind, contents)}{_SUFFIX}"

    def read(self) -> T | None:
        """What was kept; None where nothing was."""
        if self._entry is None or not is_own(self._entry.parent):
            return None
        try:
            with open_own(self._entry) as stream:
                content = stream.read()
            data = content[_SUM_BYTES:]
            if content[:_SUM_BYTES] != _sum(data):
                return None
            os.utime(self._entry)
            return self._decoder.decode(data)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def write(self, made: T) -> None:
        """Keeps ``made`` where the format carries it exactly."""
        if self._entry is None:
            return
        try:
            data = msgspec.msgpack.encode(made)
            if self._decoder.decode(data) == made and make_own(self._entry.parent):
                replace_file(self._entry, lambda stream: stream.write(_sum(data) + data))
                keep_newest(self._entry.parent, _SUFFIX, most=_MOST_ENTRIES)
        except (OSError, OverflowError, TypeError, ValueError):
            pass  # a test of a rule may hold what YAML knows and MessagePack does not


def _sum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_SUM_BYTES).digest()


def _key(kind: Any, contents: Mapping[str, bytes]) -> str:
    digest = _checker().copy()
    _add(digest, str(kind).encode())
    for name, content in contents.items():
        _add(digest, name.encode())
        _add(digest, content)
    return digest.hexdigest()


@functools.cache
def _checker() -> hashlib.blake2b:
    """Hash of the code that reads and checks rules, our own and the packages'."""
    digest = hashlib.blake2b(f"{ddpdoctor.__version__} {sys.version}".encode(), digest_size=20)
    package = Path(ddpdoctor.__file__).parent
    for content in (*((package / name).read_bytes() for name in _CODE), *_installed()):
        _add(digest, content)
    return digest


def _add(digest: hashlib.blake2b, content: bytes) -> None:
    digest.update(f"{len(content)} ".encode())
    digest.update(content)


def _installed() -> list[bytes]:
    """What changes when one of the packages is installed anew."""
    found = []
    for name in _PACKAGES:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            status = Path(spec.origin).stat()
            found.append(f"{spec.origin} {status.st_size} {status.st_mtime_ns}".encode())
    return found
