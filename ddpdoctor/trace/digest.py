"""The per-rank stage where the ranks ran: columns instead of traces, so that only small files travel.

A digest of a run directory is a run directory in which ``trace.columns`` stands for each rank's trace; of other
traces, a folder with one ``.columns`` file each. ``analyze`` takes both as it takes what they were made of.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.rundir import DIAGNOSIS_FILE, REPORT_FILE, TRACE_FILE, reason_of
from ddpdoctor.trace.archive import SUFFIX, write_archive
from ddpdoctor.trace.columns import RankTrace
from ddpdoctor.trace.load import read_traces
from ddpdoctor.trace.remote import is_url
from ddpdoctor.trace.source import is_hollow, open_binary

TRACE_DIGEST = f"trace{SUFFIX}"
_LEFT_BEHIND = (TRACE_FILE, DIAGNOSIS_FILE, REPORT_FILE)


@dataclass
class Digest:
    """What was written, and what could not be used: (file, reason)."""

    files: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)


def trace_digest(rank_directory: str) -> str | None:
    """The digest of a recorded rank's trace, None where there is none."""
    path = Path(rank_directory, TRACE_DIGEST)
    return str(path) if path.is_file() else None


def write_digests(
    targets: Mapping[str, Path],
    *,
    ranks: Mapping[str, int] | None = None,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Digest:
    """Reads each trace and writes its columns to the path that ``targets`` names for it; one that cannot be used
    is copied there.

    ``ranks``, ``jobs``, ``progress``: see :func:`ddpdoctor.trace.load.read_traces`. Raises DdpDoctorError where a
    target cannot be written.
    """
    files = list(targets)
    digest = Digest()
    for number, trace, reason in read_traces(files, jobs=jobs, progress=progress, ranks=ranks):
        if trace is None:
            digest.failed.append((files[number], reason))
            _keep(files[number], targets[files[number]])
        else:
            digest.files.append(str(_written(targets[files[number]], trace)))
    return digest


def loose_targets(files: tuple[str, ...], out: Path) -> dict[str, Path]:
    """Where the digests of traces go that are no run directory: as they lie to each other, below ``out``."""
    local = {file: os.path.abspath(file) for file in files if not is_url(file)}  # noqa: PTH100
    root = os.path.commonpath([os.path.dirname(path) for path in local.values()]) if local else ""  # noqa: PTH120
    targets = {}
    for file in files:
        inside = os.path.relpath(local[file], root) if file in local else _place_of_url(file)
        targets[file] = out / f"{inside}{SUFFIX}"
    return targets


def _place_of_url(url: str) -> str:
    """A relative path that tells what is at ``url``, without a password and without a way up."""
    host, *parts = url.partition("://")[2].partition("?")[0].split("/")
    named = [part for part in (host.rpartition("@")[2], *parts) if part not in ("", ".", "..")]
    return "/".join(named) or "trace"


def copy_records(run: str, out: Path) -> list[str]:
    """Copies what the analysis of a run directory needs besides its traces, to ``out``; a sentence on each thing that
    stays behind: a digest travels, so links out of the run directory are not followed.

    Raises DdpDoctorError where ``out`` holds something already, lies within ``run``, or cannot be written.
    """
    if out.absolute().is_relative_to(Path(run).absolute()):
        raise DdpDoctorError(f"{out} lies in the run directory itself: name a folder beside it with --out.")
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
                yield f"{source} is a link out of the run directory and was left out."
            elif not entry.is_file():
                yield f"{source} is no file and was left out."
            elif is_hollow(entry.stat()):
                yield f"{source} consists of holes and was left out."
            else:
                _copy(str(source), target)


def _copy(file: str, target: Path) -> None:
    with open_binary(file) as source, target.open("xb") as copy:
        shutil.copyfileobj(source, copy)


def discard(out: Path) -> None:
    """Removes ``out``, which :func:`copy_records` filled: half a run directory would be taken for a whole one."""
    shutil.rmtree(out, ignore_errors=True)


def _written(target: Path, trace: RankTrace) -> Path:
    """Writes ``trace`` aside and renames it into place. The name of a loose trace gets a hash of its content, for
    hosts that share the folder may have files of the same name."""
    packed = io.BytesIO()
    write_archive(packed, trace)
    data = packed.getvalue()
    if target.name != TRACE_DIGEST:
        mark = hashlib.blake2b(data, digest_size=4).hexdigest()
        target = target.with_name(f"{target.name.removesuffix(SUFFIX)}-{mark}{SUFFIX}")
    aside = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("xb") as stream:
            stream.write(data)
        aside.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise DdpDoctorError(f"{target} cannot be written: {reason_of(error).lower()}.") from error
    return target


def _keep(file: str, target: Path) -> None:
    """A trace that cannot be used here goes along as it is: the analysis then says so, or has more memory. Not so
    what a link leads to: it may be anything."""
    if is_url(file) or Path(file).is_symlink() or not Path(file).is_file() or is_hollow(Path(file).stat()):
        return
    name = TRACE_FILE if target.name == TRACE_DIGEST else target.name.removesuffix(SUFFIX)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        place = target.with_name(name)
        place.unlink(missing_ok=True)
        _copy(file, place)
    except OSError as error:
        raise DdpDoctorError(
            f"{file} cannot be copied to {target.parent}: {reason_of(error).lower()}."
        ) from error
