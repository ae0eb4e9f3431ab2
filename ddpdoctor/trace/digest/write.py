"""Traces → files of columns, each where the trace's digest belongs."""

from __future__ import annotations

import filecmp
import hashlib
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.rundir import TRACE_FILE, is_hollow, is_regular, reason_of
from ddpdoctor.trace.columns import SUFFIX, RankTrace, write_archive
from ddpdoctor.trace.formats import file_of
from ddpdoctor.trace.job import read_traces
from ddpdoctor.trace.sources import is_url, open_local
from ddpdoctor.written import write_once

from .records import Copies

TRACE_DIGEST = f"trace{SUFFIX}"
"""The file of a recorded rank that stands for its trace."""


class Digest(msgspec.Struct):
    """What was written, and what could not be used: (file, reason)."""

    files: list[str] = msgspec.field(default_factory=list)
    failed: list[tuple[str, str]] = msgspec.field(default_factory=list)


def trace_digest(rank_directory: str) -> str | None:
    """The digest of a recorded rank's trace, None where there is none."""
    path = str(Path(rank_directory, TRACE_DIGEST))
    return path if is_regular(path) else None


def write_digests(
    targets: Mapping[str, Path],
    *,
    ranks: Mapping[str, int] | None = None,
    jobs: int | None = None,
    progress: Callable[[float], None] | None = None,
    copies: Copies | None = None,
) -> Digest:
    """Reads each trace and writes its columns to the path that ``targets`` names; one that cannot be used is copied there.

    ``ranks``, ``jobs``, ``progress``: see :func:`ddpdoctor.trace.job.read_traces`; ``copies`` notes what is written. Raises
    DdpDoctorError where a target cannot be written.
    """
    files = list(targets)
    digest, copies = Digest(), copies or Copies()
    for number, trace, reason in read_traces(files, jobs=jobs, progress=progress, ranks=ranks):
        if trace is None:
            digest.failed.append((files[number], reason))
            _copy_unreadable(files[number], targets[files[number]], copies)
        else:
            digest.files.append(str(_write_columns(targets[files[number]], trace, copies)))
    return digest


def loose_targets(files: tuple[str, ...], out: Path) -> dict[str, Path]:
    """Where the digests of traces go that are no run directory: as they lie to each other, below ``out``."""
    local = {file: os.path.abspath(file) for file in files if not is_url(file)}  # noqa: PTH100
    root = os.path.commonpath([os.path.dirname(path) for path in local.values()]) if local else ""  # noqa: PTH120
    targets = {}
    for file in files:
        inside = os.path.relpath(local[file], root) if file in local else _path_of_url(file)
        targets[file] = out / f"{inside}{SUFFIX}"
    return targets


def _path_of_url(url: str) -> str:
    """A relative path that tells what is at ``url``, without a password and without a way up."""
    host, *parts = url.partition("://")[2].partition("?")[0].split("/")
    named = [part for part in (host.rpartition("@")[2], *parts) if part not in ("", ".", "..")]
    return "/".join(named) or "trace"


def _write_columns(target: Path, trace: RankTrace, copies: Copies) -> Path:
    """Writes ``trace``, as a whole; a file that holds the same stays.

    The name of a loose trace gets a hash of its content: hosts that share the folder may have files of the same name.
    """
    packed = io.BytesIO()
    write_archive(packed, trace)
    data = packed.getvalue()
    place = target if target.name == TRACE_DIGEST else _with_content_hash(target, data)
    try:
        copies.folder(place.parent)
        if write_once(place, data):
            copies.made(place)
    except OSError as error:
        raise DdpDoctorError(f"{place} cannot be written: {reason_of(error).lower()}.") from error
    return place


def _with_content_hash(target: Path, data: bytes) -> Path:
    mark = hashlib.blake2b(data, digest_size=4).hexdigest()
    return target.with_name(f"{target.name.removesuffix(SUFFIX)}-{mark}{SUFFIX}")


def _copy_unreadable(file: str, target: Path, copies: Copies) -> None:
    """A trace that cannot be used here goes along as it is: the analysis then says so, or has more memory.

    Not so what a link leads to: it may be anything.
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
        return  # that it cannot be read is said
    try:
        copies.folder(place.parent)
        if not os.path.lexists(place):
            copies.file(content, place)
        elif not filecmp.cmp(source, place, shallow=False):
            raise DdpDoctorError(f"{place} is there and is not {source}: name another folder with --out.")
    except OSError as error:
        raise DdpDoctorError(
            f"{source} cannot be copied to {target.parent}: {reason_of(error).lower()}."
        ) from error
    finally:
        content.close()
