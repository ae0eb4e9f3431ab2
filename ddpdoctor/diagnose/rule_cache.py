"""Disk cache of checked rules and of the facts' documentation, which take longer to load than a small trace to analyse.

The key is a hash of the files' content, of the code that reads and checks them, and of the installed packages that this code
uses. Entries are MessagePack data; only those of :mod:`.template_cache` contain code. An entry that cannot be read, or that another user
can write, is ignored and replaced.
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
from ddpdoctor.cachefolder import cache_folder, is_private, keep_newest, make_private, open_private
from ddpdoctor.written import replace_file

T = TypeVar("T")

_SUFFIX = ".msgpack"
_MAX_ENTRIES = 32
"""Beyond this number, the least recently used entries are removed; each change of a rule file adds one."""
_CODE_FILES = (
    "diagnose/conditions.py",
    "diagnose/facts_view.py",
    "diagnose/frameworks.py",
    "diagnose/rule_cache.py",
    "diagnose/rule.py",
    "diagnose/rule_texts.py",
    "measure/facts.py",
    "measure/runfacts.py",
    "measure/places.py",
    "measure/taxonomy.py",
)
_CHECKSUM_BYTES = 16
_PACKAGES = ("cel", "jinja2", "msgspec", "yaml")


class CachedResult(Generic[T]):
    """The cache entry of a value of type ``kind`` derived from ``contents`` (files by name). Errors of the cache are ignored."""

    def __init__(
        self,
        kind: type[T],
        contents: Mapping[str, bytes],
        folder: str = "rules",
        max_entries: int = _MAX_ENTRIES,
    ) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._entry: Path | None = None
        self._max_entries = max_entries
        with contextlib.suppress(OSError, RuntimeError):  # no home folder, or installed without files
            self._entry = cache_folder(folder) / f"{_key(kind, contents)}{_SUFFIX}"

    def read(self) -> T | None:
        """The cached value; None if there is none."""
        if self._entry is None or not is_private(self._entry.parent):
            return None
        try:
            with open_private(self._entry) as stream:
                content = stream.read()
            data = content[_CHECKSUM_BYTES:]
            if content[:_CHECKSUM_BYTES] != _checksum(data):
                return None
            os.utime(self._entry)
            return self._decoder.decode(data)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def write(self, value: T) -> None:
        """Stores ``value`` if MessagePack represents it exactly."""
        if self._entry is None:
            return
        try:
            data = msgspec.msgpack.encode(value)
            if self._decoder.decode(data) == value and make_private(self._entry.parent):
                replace_file(self._entry, lambda stream: stream.write(_checksum(data) + data))
                keep_newest(self._entry.parent, _SUFFIX, max_files=self._max_entries)
        except (OSError, OverflowError, TypeError, ValueError):
            pass  # a rule's test may have a YAML value that MessagePack lacks


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECKSUM_BYTES).digest()


def _key(kind: Any, contents: Mapping[str, bytes]) -> str:
    digest = _code_hash().copy()
    _add(digest, str(kind).encode())
    for name, content in contents.items():
        _add(digest, name.encode())
        _add(digest, content)
    return digest.hexdigest()


@functools.cache
def _code_hash() -> hashlib.blake2b:
    """Hash of the code that reads and checks rules, and of the packages that it uses."""
    digest = hashlib.blake2b(f"{ddpdoctor.__version__} {sys.version}".encode(), digest_size=20)
    package = Path(ddpdoctor.__file__).parent
    for content in (*((package / name).read_bytes() for name in _CODE_FILES), *_package_versions()):
        _add(digest, content)
    return digest


def _add(digest: hashlib.blake2b, content: bytes) -> None:
    digest.update(f"{len(content)} ".encode())
    digest.update(content)


def _package_versions() -> list[bytes]:
    """Path, size and time of each package's main file, which change when it is installed again."""
    found = []
    for name in _PACKAGES:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            status = Path(spec.origin).stat()
            found.append(f"{spec.origin} {status.st_size} {status.st_mtime_ns}".encode())
    return found
