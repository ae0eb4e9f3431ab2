"""The per-rank stage where the ranks ran: columns instead of traces, so that only small files travel.

A digest of a run directory is a run directory in which ``trace.columns`` stands for each rank's trace; of other
traces, a folder with one ``.columns`` file each. ``analyze`` takes both as it takes what they were made of.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.rundir import DIAGNOSIS_FILE, REPORT_FILE, TRACE_FILE
from ddpdoctor.trace.archive import SUFFIX, write_archive
from ddpdoctor.trace.columns import RankTrace
from ddpdoctor.trace.load import read_traces
from ddpdoctor.trace.remote import is_url

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
    local = [str(Path(file).absolute().parent) for file in files if not is_url(file)]
    root = os.path.commonpath(local) if local else ""
    targets = {}
    for file in files:
        inside = file.partition("://")[2] if is_url(file) else os.path.relpath(Path(file).absolute(), root)
        targets[file] = out / f"{inside.partition('?')[0]}{SUFFIX}"
    return targets


def copy_records(run: str, out: Path) -> None:
    """Copies what the analysis of a run directory needs besides its traces, to ``out``.

    Raises DdpDoctorError where ``out`` holds something already, lies within ``run``, or cannot be written.
    """
    if out.absolute().is_relative_to(Path(run).absolute()):
        raise DdpDoctorError(f"{out} lies in the run directory itself: name a folder beside it with --out.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DdpDoctorError(f"{out} exists already: name another folder with --out.")
    try:
        shutil.copytree(run, out, ignore=shutil.ignore_patterns(*_LEFT_BEHIND), dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        discard(out)
        raise DdpDoctorError(f"{run} cannot be copied to {out}: {_first(error)}.") from error


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
    aside = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(data)
        aside.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise DdpDoctorError(f"{target} cannot be written: {_first(error)}.") from error
    return target


def _keep(file: str, target: Path) -> None:
    """A trace that cannot be used here goes along as it is: the analysis then says so, or has more memory."""
    if is_url(file) or not Path(file).is_file():
        return
    name = TRACE_FILE if target.name == TRACE_DIGEST else target.name.removesuffix(SUFFIX)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target.with_name(name))
    except OSError as error:
        raise DdpDoctorError(f"{file} cannot be copied to {target.parent}: {_first(error)}.") from error


def _first(error: OSError | shutil.Error) -> str:
    """The reason in words; of many files that could not be copied, the first one's."""
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        said = str(error.args[0][0][-1])
    else:
        said = error.strerror or str(error)
    return re.sub(r"^\[Errno \d+\] ([^:]*).*", r"\1", said.splitlines()[0]).lower()
