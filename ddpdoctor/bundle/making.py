"""Writes a bundle: the modules that record, what they need beside the standard library, and how it was made."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import json
import stat
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ddpdoctor
from ddpdoctor.aside import replace_file
from ddpdoctor.bundle.commandline import Option
from ddpdoctor.bundle.recording import MADE_FILE
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.rundir import RUN_SCHEMA, is_run_directory

_PACKAGE = Path(ddpdoctor.__file__).parent
_RECORDS = (
    *("__init__.py", "deferred.py", "errors.py", "parentdeath.py", "plain.py", "streams.py"),
    *("hook", "rundir", "launch", "telemetry"),
    *("bundle/__init__.py", "bundle/commandline.py", "bundle/recording.py"),
)
_RECORDS_NOT = (
    *("launch/checkup.py", "launch/jobpython.py"),
    *("telemetry/live.py", "telemetry/livestep.py", "telemetry/prometheus.py", "telemetry/reader.py"),
)
"""Of those, what other commands need and a recording does not: they ask for msgspec or numpy."""
_STANDINS = "standins"
"""Folder of the bundle that is searched after all others: an environment that has the real package uses it."""
_NVML = ("pynvml", "nvidia-ml-py")
"""Plain Python over the driver's library, so it can go along; by its module and its distribution."""
_OLDEST_PYTHON = (3, 9)
_START = """\
import os
import sys

if sys.version_info < {oldest}:
    sys.exit("ddpdoctor: Python %d.%d is too old to record with; {words} or newer is needed." % sys.version_info[:2])
sys.path[0] = os.path.abspath(sys.path[0])
sys.path.append(os.path.join(sys.path[0], "{standins}"))
from ddpdoctor.bundle.recording import main

main()
"""
_NOT_BEFORE = (1980, 1, 1, 0, 0, 0)
"""The first moment that an archive can tell; all entries have it, so that the same sources give the same bytes."""


@dataclass(frozen=True)
class Bundle:
    """A bundle that was written."""

    path: Path
    bytes: int
    sha256: str
    """Of what is in it: names and contents."""
    versions: Mapping[str, str]


def write_bundle(out: Path, options: Sequence[Option], help_text: str) -> Bundle:
    """Write a bundle whose ``run`` takes ``options``: a file where the name ends in .pyz or .zip, else a folder.

    The same sources give the same bytes. A bundle that is there is replaced. Raises DdpDoctorError where something else is, or where
    nothing can be written.
    """
    _check_place(out)
    files = dict(_files())
    versions = {"ddpdoctor": ddpdoctor.__version__, "schema": RUN_SCHEMA, **_nvml_version(files)}
    digest = _digest(files)
    made = {"versions": versions, "sha256": digest, "options": options, "help": help_text}
    files[f"ddpdoctor/bundle/{MADE_FILE}"] = json.dumps(made, indent=1, sort_keys=True).encode() + b"\n"
    try:
        if out.suffix in (".pyz", ".zip"):
            _write_archive(out, files)
        else:
            _write_folder(out, files)
    except OSError as error:
        raise DdpDoctorError(f"cannot write {out}: {error.strerror or error}") from error
    return Bundle(out, sum(map(len, files.values())), digest, versions)


def _files() -> Iterator[tuple[str, bytes]]:
    """Name in the bundle, and content, of all that goes into it but how it was made."""
    for name in _RECORDS:
        place = _PACKAGE / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            inside = file.relative_to(_PACKAGE).as_posix()
            if inside not in _RECORDS_NOT:
                yield f"ddpdoctor/{inside}", file.read_bytes()
    for file in sorted((_PACKAGE / "bundle" / _STANDINS).glob("*.py")):
        yield f"{_STANDINS}/{file.name}", file.read_bytes()
    found = importlib.util.find_spec(_NVML[0])
    if found is not None and found.origin is not None:
        yield f"{_STANDINS}/{_NVML[0]}.py", Path(found.origin).read_bytes()
    words = ".".join(map(str, _OLDEST_PYTHON))
    start = _START.format(oldest=_OLDEST_PYTHON, words=words, standins=_STANDINS)
    yield "__main__.py", start.encode()


def _nvml_version(files: Mapping[str, bytes]) -> dict[str, str]:
    if f"{_STANDINS}/{_NVML[0]}.py" not in files:
        return {}
    return {_NVML[1]: importlib.metadata.version(_NVML[1])}


def _digest(files: Mapping[str, bytes]) -> str:
    whole = hashlib.sha256()
    for name, content in sorted(files.items()):
        whole.update(f"{name}\0{len(content)}\0".encode())
        whole.update(content)
    return whole.hexdigest()


def _check_place(out: Path) -> None:
    if str(out) == "-":
        raise DdpDoctorError("a bundle is a file or a folder: name one.")
    if any(is_run_directory(str(folder)) for folder in out.absolute().parents):
        raise DdpDoctorError(f"{out} lies in a recorded run: name another place.")


def _write_archive(out: Path, files: Mapping[str, bytes]) -> None:
    if out.exists() and not (out.is_file() and _holds_bundle(out)):
        raise DdpDoctorError(f"{out} is there and no bundle: name another file.")
    whole = io.BytesIO()
    whole.write(b"#!/usr/bin/env python3\n")
    # Not compressed: ranks import from it, also by a Python that lacks zlib, and no version of zlib decides about its bytes.
    with zipfile.ZipFile(whole, "a", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _NOT_BEFORE)
            entry.create_system, entry.external_attr = 3, (stat.S_IFREG | 0o644) << 16  # as on Unix
            archive.writestr(entry, content)
    replace_file(out, lambda stream: stream.write(whole.getvalue()))
    out.chmod(0o755)


def _write_folder(out: Path, files: Mapping[str, bytes]) -> None:
    if out.exists() and not (out.is_dir() and (_is_bundle(out) or not _holds_files(out))):
        raise DdpDoctorError(
            f"{out} is there and no bundle: name another folder, or a file that ends in .pyz."
        )
    for old in sorted(out.rglob("*.py")):
        if old.relative_to(out).as_posix() not in files:
            old.unlink()
    # Begun with what says that it is a bundle: if the disk fills up, the next call goes on.
    for name, content in sorted(files.items(), key=lambda file: not file[0].endswith(MADE_FILE)):
        replace_file(out / name, lambda stream, content=content: stream.write(content))  # type: ignore[misc]
        (out / name).chmod(0o644)


def _holds_bundle(file: Path) -> bool:
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return f"ddpdoctor/bundle/{MADE_FILE}" in archive.namelist()


def _holds_files(folder: Path) -> bool:
    return any(not inside.is_dir() for inside in folder.rglob("*"))


def _is_bundle(folder: Path) -> bool:
    return (folder / "ddpdoctor" / "bundle" / MADE_FILE).is_file()
