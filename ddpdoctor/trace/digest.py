"""Parses traces on the machine on which the ranks ran and writes their columns, so that only small files need to be copied.

The digest of a run directory is a run directory in which ``trace.columns`` replaces each rank's trace. The digest of loose traces is a
folder with one ``.columns`` file each. ``analyze`` accepts both and gives the same diagnosis as for the originals.
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

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
    is_regular,
    is_run_directory,
    reason_of,
    recorded_notes,
    write_json,
)
from ddpdoctor.rundir.reader import read_manifest
from ddpdoctor.trace.archive import SUFFIX, write_archive
from ddpdoctor.trace.columns import RankTrace
from ddpdoctor.trace.formats import file_of
from ddpdoctor.trace.load import read_traces
from ddpdoctor.trace.sources import is_url, open_local
from ddpdoctor.written import write_once

_EXCLUDED = (TRACE_FILE, DIAGNOSIS_FILE, REPORT_FILE)
"""Traces are replaced by columns; diagnosis and report can be created again from the digest."""


class CreatedFiles:
    """Records the files and folders that a digest creates, so that only these are removed after a failure."""

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
        """Remove all recorded files and folders: an incomplete run directory would be mistaken for a complete one."""
        for file in reversed(self._files):
            with contextlib.suppress(OSError):
                file.unlink()
        for folder in reversed(self._folders):
            with contextlib.suppress(OSError):
                folder.rmdir()


def copy_run_directory(run: str, out: Path, copies: CreatedFiles) -> list[str]:
    """Copies the run directory ``run`` without its traces to ``out``. Returns a sentence per skipped file, and adds them to the
    notes in the manifest of ``out``.

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
    """Copies the ``entries`` of a folder inside ``run`` to ``out``. Yields a note per skipped entry. Raises OSError if ``out`` cannot be
    written."""
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


TRACE_DIGEST = f"trace{SUFFIX}"
"""File in a recorded rank's folder that replaces its trace."""


class Digest(msgspec.Struct):
    """Result: the files written, and (file, reason) of traces that could not be read."""

    files: list[str] = msgspec.field(default_factory=list)
    failed: list[tuple[str, str]] = msgspec.field(default_factory=list)


def trace_digest(rank_directory: str) -> str | None:
    """Path of the ``trace.columns`` in a rank's folder; None if there is none."""
    path = str(Path(rank_directory, TRACE_DIGEST))
    return path if is_regular(path) else None


def write_digests(
    targets: Mapping[str, Path],
    *,
    ranks: Mapping[str, int] | None = None,
    jobs: int | None = None,
    progress: Callable[[float], None] | None = None,
    copies: CreatedFiles | None = None,
) -> Digest:
    """Reads each trace in ``targets`` and writes its columns to the given path. A trace that cannot be read is copied there.

    ``ranks``, ``jobs``, ``progress``: see :func:`ddpdoctor.trace.load.read_traces`. ``copies`` records what is written. Raises
    DdpDoctorError if a target cannot be written.
    """
    files = list(targets)
    digest, copies = Digest(), copies or CreatedFiles()
    for number, trace, reason in read_traces(files, jobs=jobs, progress=progress, ranks=ranks):
        if trace is None:
            digest.failed.append((files[number], reason))
            _copy_unreadable(files[number], targets[files[number]], copies)
        else:
            digest.files.append(str(_write_columns(targets[files[number]], trace, copies)))
    return digest


def loose_targets(files: tuple[str, ...], out: Path) -> dict[str, Path]:
    """Target path of each of ``files`` (traces outside of run directories): below ``out``, with the same relative path."""
    local = {file: os.path.abspath(file) for file in files if not is_url(file)}  # noqa: PTH100
    root = os.path.commonpath([os.path.dirname(path) for path in local.values()]) if local else ""  # noqa: PTH120
    targets = {}
    for file in files:
        inside = os.path.relpath(local[file], root) if file in local else _path_of_url(file)
        targets[file] = out / f"{inside}{SUFFIX}"
    return targets


def _path_of_url(url: str) -> str:
    """Relative path from host and path of ``url``, without user, password, query and ``..``."""
    host, *parts = url.partition("://")[2].partition("?")[0].split("/")
    named = [part for part in (host.rpartition("@")[2], *parts) if part not in ("", ".", "..")]
    return "/".join(named) or "trace"


def _write_columns(target: Path, trace: RankTrace, copies: CreatedFiles) -> Path:
    """Writes ``trace`` atomically, unless a file with the same content exists. Returns the path.

    The file name of a loose trace contains a hash of the content, because hosts that share the folder may have equal file names.
    """
    packed = io.BytesIO()
    write_archive(packed, trace)
    data = packed.getvalue()
    place = target
    if target.name != TRACE_DIGEST:
        mark = hashlib.blake2b(data, digest_size=4).hexdigest()
        place = target.with_name(f"{target.name.removesuffix(SUFFIX)}-{mark}{SUFFIX}")
    try:
        copies.make_folder(place.parent)
        if write_once(place, data):
            copies.record(place)
    except OSError as error:
        raise DdpDoctorError(f"{place} cannot be written: {reason_of(error).lower()}.") from error
    return place


def _copy_unreadable(file: str, target: Path, copies: CreatedFiles) -> None:
    """Copies a trace unchanged that cannot be read here. The analysis then reports it, or can read it because it has more memory.

    Links are not followed.
    """
    source = file_of(file)
    found = Path(source)
    if is_url(source) or found.is_symlink() or not found.is_file() or is_hollow(found.stat()):
        return
    own_name = target.name.removesuffix(SUFFIX).removesuffix(file[len(source) :])
    place = target.with_name(TRACE_FILE if target.name == TRACE_DIGEST else own_name)
    try:
        content = open_local(source)
    except OSError:
        return  # the caller has reported that it cannot be read
    try:
        copies.make_folder(place.parent)
        if not os.path.lexists(place):
            copies.copy_file(content, place)
        elif not filecmp.cmp(source, place, shallow=False):
            raise DdpDoctorError(f"{place} is there and is not {source}: name another folder with --out.")
    except OSError as error:
        raise DdpDoctorError(
            f"{source} cannot be copied to {target.parent}: {reason_of(error).lower()}."
        ) from error
    finally:
        content.close()
