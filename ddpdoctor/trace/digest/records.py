"""What a run directory holds besides its traces, copied to where its digest is made."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.rundir import (
    DIAGNOSIS_FILE,
    MANIFEST_FILE,
    REPORT_FILE,
    RUN_SCHEMA,
    TRACE_FILE,
    Note,
    NoteCode,
    is_hollow,
    is_run_directory,
    read_manifest,
    reason_of,
    recorded_notes,
    write_json,
)
from ddpdoctor.trace.sources import open_local

_EXCLUDED = (TRACE_FILE, DIAGNOSIS_FILE, REPORT_FILE)
"""Traces travel as columns; what was made of a recording is made anew from its digest."""


class Copies:
    """What is put into the folder of a digest: a failure takes back these files and folders, and nothing else."""

    def __init__(self) -> None:
        self._files: list[Path] = []
        self._folders: list[Path] = []

    def folder(self, folder: Path) -> None:
        """Make ``folder`` and those around it. Raises OSError."""
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        for each in reversed(missing):
            with contextlib.suppress(FileExistsError):
                each.mkdir()
                self._folders.append(each)

    def file(self, source: BinaryIO, target: Path) -> None:
        """Copy an open file to ``target``, which does not exist yet. Raises OSError."""
        with target.open("xb") as copy:
            self._files.append(target)
            shutil.copyfileobj(source, copy)

    def made(self, file: Path) -> None:
        """``file`` was written."""
        self._files.append(file)

    def discard(self) -> None:
        """Remove them: half a run directory would be taken for a whole one."""
        for file in reversed(self._files):
            with contextlib.suppress(OSError):
                file.unlink()
        for folder in reversed(self._folders):
            with contextlib.suppress(OSError):
                folder.rmdir()


def copy_records(run: str, out: Path, copies: Copies) -> list[str]:
    """Copies what the analysis of a run directory needs besides its traces, to ``out``; a sentence on what stays behind, which the
    manifest there tells, too.

    A digest travels, so links out of the run directory are not followed. Raises DdpDoctorError where ``out`` holds
    something already, or cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DdpDoctorError(f"{out} exists already: name another folder with --out.")
    try:
        notes = list(_copy_entries(_entries(Path(run)), Path(run), out, copies))
        if notes:
            _add_notes(notes, run, out / MANIFEST_FILE, copies)
        return list(map(str, notes))
    except OSError as error:
        copies.discard()
        raise DdpDoctorError(f"{run} cannot be copied to {out}: {reason_of(error).lower()}.") from error


def _add_notes(notes: list[Note], run: str, manifest: Path, copies: Copies) -> None:
    """Puts ``notes`` into the ``manifest`` of a digest, behind those that are there. Raises OSError."""
    faults: list[Note] = []
    document = read_manifest(str(manifest.parent), []) or read_manifest(run, faults)
    known = recorded_notes(document.get("notes") or [], document.get("note_codes") or [])
    all_notes = [*known, *faults, *notes]
    fields = {
        "notes": [note.text for note in all_notes],
        "note_codes": [note.code.value for note in all_notes],
    }
    if not manifest.exists():
        copies.made(manifest)
    write_json(str(manifest), {"schema": RUN_SCHEMA, **document, **fields})


def refuse_inside_run(out: Path) -> None:
    """Raises DdpDoctorError where ``out``, behind all links, is a run directory or lies in one."""
    place = Path(os.path.realpath(out))
    if is_run_directory(str(place)):
        raise DdpDoctorError(f"{out} exists already and is a run directory: name another folder with --out.")
    run = next((folder for folder in place.parents if is_run_directory(str(folder))), None)
    if run is not None:
        raise DdpDoctorError(f"{out} is inside the run directory {run}: name a folder outside it with --out.")


def lies_within(path: str | Path, run: str | Path) -> bool:
    """Whether what is at ``path``, behind all links, lies in the run directory ``run``."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _copy_entries(
    entries: Sequence[os.DirEntry[str]], run: Path, out: Path, copies: Copies
) -> Iterator[Note]:
    """Copies ``entries`` of a folder, which lies in ``run``, to ``out``; gives a note on what is left out. Raises OSError
    where ``out`` cannot be written."""
    copies.folder(out)
    for entry in entries:
        source, target = Path(entry.path), out / entry.name
        if entry.name in _EXCLUDED:
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                opened: BinaryIO | list[os.DirEntry[str]] = _entries(source)
            elif entry.is_symlink() and not lies_within(source, run):
                yield Note(f"{source} is a link out of the run directory and was skipped.")
                continue
            elif not entry.is_file():
                yield Note(f"{source} is not a file and was skipped.")
                continue
            elif is_hollow(entry.stat()):
                yield Note(f"{source} consists of holes and was skipped.")
                continue
            else:
                opened = open_local(str(source))
        except OSError as error:
            fields = f"{source} cannot be read ({reason_of(error).lower()}) and was skipped."
            yield Note(fields, NoteCode.UNREADABLE)
            continue
        if isinstance(opened, list):
            yield from _copy_entries(opened, run, target, copies)
        else:
            with opened:
                copies.file(opened, target)
