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
from ddpdoctor.bundle.commandline import Option
from ddpdoctor.bundle.recording import MADE_FILE
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.rundir import RUN_SCHEMA, is_run_directory
from ddpdoctor.written import BUNDLE, WrittenFolder, is_stdout, write_file

_PACKAGE = Path(ddpdoctor.__file__).parent
_RECORDS = (
    *("__init__.py", "deferred.py", "errors.py", "parentdeath.py", "plain.py", "readable.py", "streams.py"),
    *("hook", "rundir", "launch", "telemetry"),
    *("bundle/__init__.py", "bundle/commandline.py", "bundle/recording.py"),
)
_RECORDS_NOT = (
    *("launch/checkup.py", "launch/jobpython.py"),
    *("telemetry/live.py", "telemetry/prometheus.py", "telemetry/reader.py"),
    "telemetry/scrapes.py",
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

    The same sources give the same bytes. An earlier bundle is replaced if nobody changed it since; in a folder, what else lies
    there stays. Raises DdpDoctorError otherwise, or if nothing can be written.
    """
    _check_place(out)
    files = dict(_files())
    versions = {"ddpdoctor": ddpdoctor.__version__, "schema": RUN_SCHEMA, **_nvml_version(files)}
    digest = _digest(files)
    made = {"versions": versions, "sha256": digest, "options": options, "help": help_text}
    files[f"ddpdoctor/bundle/{MADE_FILE}"] = json.dumps(made, indent=1, sort_keys=True).encode() + b"\n"
    if out.suffix in (".pyz", ".zip"):
        write_file(out, _archive(files), BUNDLE, mode=0o777)
    else:
        folder = WrittenFolder(out, "bundle", alone=True)
        folder.check(files)
        folder.remove(folder.others(files))
        folder.write(sorted(files.items()))
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
    if is_stdout(out):
        raise DdpDoctorError("a bundle is a file or a folder: name one.")
    if any(is_run_directory(str(folder)) for folder in out.absolute().parents):
        raise DdpDoctorError(f"{out} lies in a recorded run: name another place.")


def _archive(files: Mapping[str, bytes]) -> bytes:
    """A zip archive whose comment is its seal, which is yet to be appended."""
    whole = io.BytesIO()
    whole.write(b"#!/usr/bin/env python3\n")
    # Not compressed: ranks import from it, also by a Python that lacks zlib, and no version of zlib decides about its bytes.
    with zipfile.ZipFile(whole, "a", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _NOT_BEFORE)
            entry.create_system, entry.external_attr = 3, (stat.S_IFREG | 0o644) << 16  # as on Unix
            archive.writestr(entry, content)
        archive.comment = bytes(BUNDLE.seal_bytes)
    return whole.getvalue()[: -BUNDLE.seal_bytes]
