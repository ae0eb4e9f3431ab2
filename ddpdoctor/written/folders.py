"""Writes folders of files with a list of their hashes."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.rundir import is_run_directory, open_regular, read_bounded
from ddpdoctor.written.files import (
    Identity,
    as_user_errors,
    hash_of,
    identity,
    replace_file,
    resolve_target,
    write_checked,
)

LIST = "ddpdoctor.sha256"
"""File with a line ``<sha256>  <name>`` for each file that ddpdoctor wrote to the folder."""
_LIST_BYTES = 4 << 20
_LISTED = re.compile(r"([0-9a-f]{64})  ([^\0\n]{1,400})")


class WrittenFolder:
    """A folder of files with a list of their hashes. ``noun``: what is written, for messages. ``must_be_empty``: refuse a folder that
    contains files but no list."""

    def __init__(self, folder: Path, noun: str, must_be_empty: bool = False) -> None:
        self._folder, self._noun, self._must_be_empty = folder, noun, must_be_empty
        self._root: Path | None = None
        self._hashes: dict[str, set[str]] = {}

    def check(self, names: Iterable[str]) -> None:
        """Raise DdpDoctorError if one of ``names`` must not be written, because ddpdoctor did not write it or it was changed."""
        with as_user_errors(self._folder):
            self._root = self._find_root()
            self._hashes = self._read_list()
            if self._must_be_empty and not self._hashes and any(files for _, _, files in os.walk(self._root)):
                raise DdpDoctorError(
                    f"{self._folder} is not empty and holds no {self._noun}: name another folder."
                )
            for name in names:
                self._check_replaceable(name)

    def leftover_files(self, names: Iterable[str]) -> list[str]:
        """Existing files in the list that are not in ``names``."""
        return sorted(name for name in self._hashes.keys() - set(names) if os.path.lexists(self._path(name)))

    def write(self, files: Iterable[tuple[str, bytes]], mode: int = 0o666) -> list[Path]:
        """Write ``files`` (name, content) and return their paths. Each file is checked as in :meth:`check` when it is written."""
        if self._root is None:
            self.check(())
        written = []
        for name, data in files:
            with as_user_errors(self._folder / name):
                self._write(name, data, mode)
            written.append(self._folder / name)
        return written

    def _write(self, name: str, data: bytes, mode: int) -> None:
        self._path(name).parent.mkdir(parents=True, exist_ok=True)
        self._hashes = self._read_list()
        self._check_replaceable(name)
        new = hashlib.sha256(data).hexdigest()
        # The list has both hashes until the file is replaced, so that it remains valid if this is interrupted.
        self._write_list({**self._hashes, name: {*self._hashes.get(name, ()), new}})
        write_checked(self._path(name), data, lambda: self._check_replaceable(name), mode)
        self._write_list({**self._hashes, name: {new}})

    def remove(self, names: Iterable[str]) -> None:
        """Remove files in the list. Raises DdpDoctorError if one was changed after it was written."""
        with as_user_errors(self._folder):
            for name in names:
                self._check_replaceable(name)
                self._path(name).unlink()
                self._write_list({each: found for each, found in self._hashes.items() if each != name})

    def _find_root(self) -> Path:
        root = resolve_target(self._folder, "folder")
        if is_run_directory(str(root)):
            raise DdpDoctorError(f"{self._folder} is a recorded run: name another folder.")
        if root.exists() and not root.is_dir():
            raise DdpDoctorError(f"{self._folder} is a file: name another folder.")
        return root

    def _read_list(self) -> dict[str, set[str]]:
        try:
            text = read_bounded(str(self._path(LIST)), _LIST_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            return {}
        lines = [_LISTED.fullmatch(line) for line in text.split("\n") if line]
        if not all(lines):
            raise DdpDoctorError(
                f"{self._folder / LIST} is not a list that ddpdoctor wrote: name another folder."
            )
        found: dict[str, set[str]] = {}
        for line in lines:
            if line is not None and _stays_inside(line[2]):
                found.setdefault(line[2], set()).add(line[1])
        return found

    def _write_list(self, hashes: Mapping[str, set[str]]) -> None:
        lines = [f"{each}  {name}\n" for name in sorted(hashes) for each in sorted(hashes[name])]
        replace_file(self._path(LIST), lambda stream: stream.write("".join(lines).encode()), 0o666)
        self._hashes = dict(hashes)

    def _check_replaceable(self, name: str) -> Identity | None:
        """Identity of the file ``name``; None if there is none. Raises DdpDoctorError if it must not be replaced, and OSError."""
        parts = name.split("/")
        for length in range(1, len(parts)):
            inside = self._path("/".join(parts[:length]))
            if inside.is_symlink() or (inside.exists() and not inside.is_dir()):
                raise DdpDoctorError(f"{inside} is no folder of {self._noun}: name another folder.")
        path = self._path(name)
        if not os.path.lexists(path):
            return None
        shown = self._folder / name
        if not stat.S_ISREG(path.lstat().st_mode) or name not in self._hashes:
            raise DdpDoctorError(f"{shown} is there and was not written by ddpdoctor: name another folder.")
        with os.fdopen(open_regular(str(path)), "rb") as file:
            if hash_of(file) not in self._hashes[name]:
                raise DdpDoctorError(f"{shown} was changed after ddpdoctor wrote it: name another folder.")
            return identity(os.fstat(file.fileno()))

    def _path(self, name: str) -> Path:
        assert self._root is not None, "checked first"
        return self._root / name


def _stays_inside(name: str) -> bool:
    return all(part not in ("", ".", "..") for part in name.split("/"))
