"""What a run directory holds besides its traces, copied to where its digest is made."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.rundir import DIAGNOSIS_FILE, REPORT_FILE, TRACE_FILE, reason_of
from ddpdoctor.trace.sources import is_hollow, open_binary

_LEFT_BEHIND = (TRACE_FILE, DIAGNOSIS_FILE, REPORT_FILE)
"""Traces travel as columns; what was made of a recording is made anew from its digest."""


def copy_records(run: str, out: Path) -> list[str]:
    """Copies what the analysis of a run directory needs besides its traces, to ``out``; a sentence on what stays behind.

    A digest travels, so links out of the run directory are not followed. Raises DdpDoctorError where ``out`` holds
    something already, lies within ``run``, or cannot be written.
    """
    if out.absolute().is_relative_to(Path(run).absolute()):
        raise DdpDoctorError(f"{out} is inside the run directory: name a folder outside it with --out.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DdpDoctorError(f"{out} exists already: name another folder with --out.")
    try:
        return list(_copied(Path(run), Path(run), out))
    except OSError as error:
        discard(out)
        raise DdpDoctorError(f"{run} cannot be copied to {out}: {reason_of(error).lower()}.") from error


def lies_within(path: str | Path, run: str | Path) -> bool:
    """Whether what is at ``path``, behind all links, lies in the run directory ``run``."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run))


def _copied(folder: Path, run: Path, out: Path) -> Iterator[str]:
    """Copies ``folder``, which lies in ``run``, to ``out``; gives a sentence on what is left out. Raises OSError."""
    out.mkdir(parents=True, exist_ok=True)
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            source, target = Path(entry.path), out / entry.name
            if entry.name in _LEFT_BEHIND:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _copied(source, run, target)
            elif entry.is_symlink() and not lies_within(source, run):
                yield f"{source} is a link out of the run directory and was skipped."
            elif not entry.is_file():
                yield f"{source} is not a file and was skipped."
            elif is_hollow(entry.stat()):
                yield f"{source} consists of holes and was skipped."
            else:
                copy_file(str(source), target)


def discard(out: Path) -> None:
    """Removes ``out``, which :func:`copy_records` filled: half a run directory would be taken for a whole one."""
    shutil.rmtree(out, ignore_errors=True)


def copy_file(file: str, target: Path) -> None:
    """Copies a regular file to ``target``, which does not exist yet. Raises OSError."""
    with open_binary(file) as source, target.open("xb") as copy:
        shutil.copyfileobj(source, copy)
