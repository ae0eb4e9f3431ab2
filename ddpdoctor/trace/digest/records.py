"""Copies a run directory without its traces to the folder of its digest."""

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
"""Traces are replaced by columns; diagnosis and report can be created again from the digest."""


class CreatedFiles:
    """Records the files and folders that a digest creates, so that a failure removes these and nothing else."""

    def __init__(self) -> None:
        self._files: list[Path] = []
        self._folders: list[Path] = []

    def make_folder(self, folder: Path) -> None:
        """Create ``folder`` and its missing parents. Raises OSError."""
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        for each in reversed(missing):
            with contextlib.suppress(FileExistsError):
                each.mkdir()
                self._folders.append(each)

    def copy_file(self, source: BinaryIO, target: Path) -> None:
        """Copy an open file to ``target``, which does not exist yet. Raises OSError."""
        with target.open("xb") as copy:
            self._files.append(target)
            shutil.copyfileobj(source, copy)

    def record(self, file: Path) -> None:
        """Record ``file``, which the caller has written."""
        self._files.append(file)

    def discard(self) -> None:
        """Remove all of them: an incomplete run directory would be mistaken for a complete one."""
        for file in reversed(self._files):
            with contextlib.suppress(OSError):
                file.unlink()
        for folder in reversed(self._folders):
            with contextlib.suppress(OSError):
                folder.rmdir()


def copy_run_directory(run: str, out: Path, copies: CreatedFiles) -> list[str]:
    """Copies the run directory ``run`` without its traces to ``out``; returns a sentence per skipped file, which the manifest of
    ``out`` has as notes too.

    Links out of the run directory are not followed, because a digest is copied to other machines. Raises DdpDoctorError if
    ``out`` is not empty or cannot be written.
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


def _add_notes(notes: list[Note], run: str, manifest: Path, copies: CreatedFiles) -> None:
    """Appends ``notes`` to those in the ``manifest`` of a digest. Raises OSError."""
    faults: list[Note] = []
    document = read_manifest(str(manifest.parent), []) or read_manifest(run, faults)
    known = recorded_notes(document.get("notes") or [], document.get("note_codes") or [])
    all_notes = [*known, *faults, *notes]
    fields = {
        "notes": [note.text for note in all_notes],
        "note_codes": [note.code.value for note in all_notes],
    }
    if not manifest.exists():
        copies.record(manifest)
    write_json(str(manifest), {"schema": RUN_SCHEMA, **document, **fields})


def check_outside_run(out: Path) -> None:
    """Raises DdpDoctorError if ``out``, with links resolved, is a run directory or inside one."""
    place = Path(os.path.realpath(out))
    if is_run_directory(str(place)):
        raise DdpDoctorError(f"{out} exists already and is a run directory: name another folder with --out.")
    run = next((folder for folder in place.parents if is_run_directory(str(folder))), None)
    if run is not None:
        raise DdpDoctorError(f"{out} is inside the run directory {run}: name a folder outside it with --out.")


def is_within(path: str | Path, run: str | Path) -> bool:
    """Whether ``path``, with links resolved, is inside the run directory ``run``."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _copy_entries(
    entries: Sequence[os.DirEntry[str]], run: Path, out: Path, copies: CreatedFiles
) -> Iterator[Note]:
    """Copies the ``entries`` of a folder inside ``run`` to ``out``; yields a note per skipped entry. Raises OSError if
    ``out`` cannot be written."""
    copies.make_folder(out)
    for entry in entries:
        source, target = Path(entry.path), out / entry.name
        if entry.name in _EXCLUDED:
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                opened: BinaryIO | list[os.DirEntry[str]] = _entries(source)
            elif entry.is_symlink() and not is_within(source, run):
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
            text = f"{source} cannot be read ({reason_of(error).lower()}) and was skipped."
            yield Note(text, NoteCode.UNREADABLE)
            continue
        if isinstance(opened, list):
            yield from _copy_entries(opened, run, target, copies)
        else:
            with opened:
                copies.copy_file(opened, target)
