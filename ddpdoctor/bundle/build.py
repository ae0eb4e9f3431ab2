"""Writes a bundle: the modules that record a job, the packages that they need, and build information."""

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
from ddpdoctor.bundle.recording import BUILD_FILE, Option
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.rundir.layout import RUN_SCHEMA, is_run_directory
from ddpdoctor.written import BUNDLE, WrittenFolder, is_stdout, write_file

_PACKAGE = Path(ddpdoctor.__file__).parent
_INCLUDED = (
    *("__init__.py", "errors.py", "plain.py", "process.py"),
    *("hook", "rundir", "launch", "telemetry"),
    *("bundle/__init__.py", "bundle/recording.py"),
)
_EXCLUDED = (
    "launch/checkup.py",
    *("telemetry/live.py", "telemetry/prometheus.py", "telemetry/scrapes.py"),
)
"""Modules of these packages that recording does not need and that import msgspec or numpy."""
_STANDINS = "standins"
"""Folder of the bundle at the end of ``sys.path``, so that installed packages take precedence over those in it."""
_NVML = ("pynvml", "nvidia-ml-py")
"""Module and distribution name of NVML's Python binding, which is pure Python and is included."""
_OLDEST_PYTHON = (3, 9)
_MAIN = """\
import os
import sys

if sys.version_info < {oldest}:
    sys.exit("ddpdoctor: Python %d.%d is too old to record with; {words} or newer is needed." % sys.version_info[:2])
sys.path[0] = os.path.abspath(sys.path[0])
sys.path.append(os.path.join(sys.path[0], "{standins}"))
from ddpdoctor.bundle.recording import main

main()
"""
_ENTRY_TIME = (1980, 1, 1, 0, 0, 0)
"""Modification time of all entries, the earliest of the ZIP format, so that equal sources give equal bytes."""


@dataclass(frozen=True)
class Bundle:
    """A bundle that was written."""

    path: Path
    bytes: int
    sha256: str
    """Hash of all names and contents."""
    versions: Mapping[str, str]


def write_bundle(out: Path, options: Sequence[Option], help_text: str) -> Bundle:
    """Write a bundle whose ``run`` has ``options``: a file if the name ends in .pyz or .zip, else a folder.

    Equal sources give equal bytes. An earlier bundle is replaced if it is unchanged; other files in a folder stay. Raises
    DdpDoctorError if ``out`` has other content or cannot be written.
    """
    _check_target(out)
    files = dict(_files())
    versions = {"ddpdoctor": ddpdoctor.__version__, "schema": RUN_SCHEMA, **_nvml_version(files)}
    digest = _digest(files)
    document = {"versions": versions, "sha256": digest, "options": options, "help": help_text}
    files[f"ddpdoctor/bundle/{BUILD_FILE}"] = json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"
    if out.suffix in (".pyz", ".zip"):
        write_file(out, _archive(files), BUNDLE, mode=0o777)
    else:
        folder = WrittenFolder(out, "bundle", must_be_empty=True)
        folder.check(files)
        folder.remove(folder.leftover_files(files))
        folder.write(sorted(files.items()))
    return Bundle(out, sum(map(len, files.values())), digest, versions)


def _files() -> Iterator[tuple[str, bytes]]:
    """Yields (name, content) of all files of the bundle except the build information."""
    for name in _INCLUDED:
        place = _PACKAGE / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            inside = file.relative_to(_PACKAGE).as_posix()
            if inside not in _EXCLUDED:
                yield f"ddpdoctor/{inside}", file.read_bytes()
    found = importlib.util.find_spec(_NVML[0])
    if found is not None and found.origin is not None:
        yield f"{_STANDINS}/{_NVML[0]}.py", Path(found.origin).read_bytes()
    words = ".".join(map(str, _OLDEST_PYTHON))
    start = _MAIN.format(oldest=_OLDEST_PYTHON, words=words, standins=_STANDINS)
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


def _check_target(out: Path) -> None:
    if is_stdout(out):
        raise DdpDoctorError("a bundle is a file or a folder: name one.")
    if any(is_run_directory(str(folder)) for folder in out.absolute().parents):
        raise DdpDoctorError(f"{out} lies in a recorded run: name another place.")


def _archive(files: Mapping[str, bytes]) -> bytes:
    """A ZIP archive without its comment, which is the seal that :func:`write_file` appends."""
    whole = io.BytesIO()
    whole.write(b"#!/usr/bin/env python3\n")
    # Not compressed: a Python without zlib can import from it, and the bytes do not depend on zlib's version.
    with zipfile.ZipFile(whole, "a", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _ENTRY_TIME)
            entry.create_system, entry.external_attr = 3, (stat.S_IFREG | 0o644) << 16  # as on Unix
            archive.writestr(entry, content)
        archive.comment = bytes(BUNDLE.seal_bytes)
    return whole.getvalue()[: -BUNDLE.seal_bytes]
