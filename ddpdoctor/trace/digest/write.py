"""Writes the columns of traces to ``.columns`` files."""

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

from .records import CreatedFiles

TRACE_DIGEST = f"trace{SUFFIX}"
"""File in a recorded rank's folder that replaces its trace."""


class Digest(msgspec.Struct):
    """The files written, and the traces that could not be read: (file, reason)."""

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
    """Reads each trace of ``targets`` and writes its columns to the given path; a trace that cannot be read is copied there.

    ``ranks``, ``jobs``, ``progress``: see :func:`ddpdoctor.trace.job.read_traces`. ``copies`` records what is written. Raises
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
    """Target path of each of ``files``, traces outside of run directories: below ``out``, at the same relative path."""
    local = {file: os.path.abspath(file) for file in files if not is_url(file)}  # noqa: PTH100
    root = os.path.commonpath([os.path.dirname(path) for path in local.values()]) if local else ""  # noqa: PTH120
    targets = {}
    for file in files:
        inside = os.path.relpath(local[file], root) if file in local else _path_of_url(file)
        targets[file] = out / f"{inside}{SUFFIX}"
    return targets


def _path_of_url(url: str) -> str:
    """A relative path from host and path of ``url``, without user, password, query and ``..``."""
    host, *parts = url.partition("://")[2].partition("?")[0].split("/")
    named = [part for part in (host.rpartition("@")[2], *parts) if part not in ("", ".", "..")]
    return "/".join(named) or "trace"


def _write_columns(target: Path, trace: RankTrace, copies: CreatedFiles) -> Path:
    """Writes ``trace`` atomically unless the same content is there; returns the path.

    The name of a loose trace gets a hash of its content, because hosts that share the folder may have equal file names.
    """
    packed = io.BytesIO()
    write_archive(packed, trace)
    data = packed.getvalue()
    place = target if target.name == TRACE_DIGEST else _with_content_hash(target, data)
    try:
        copies.make_folder(place.parent)
        if write_once(place, data):
            copies.record(place)
    except OSError as error:
        raise DdpDoctorError(f"{place} cannot be written: {reason_of(error).lower()}.") from error
    return place


def _with_content_hash(target: Path, data: bytes) -> Path:
    mark = hashlib.blake2b(data, digest_size=4).hexdigest()
    return target.with_name(f"{target.name.removesuffix(SUFFIX)}-{mark}{SUFFIX}")


def _copy_unreadable(file: str, target: Path, copies: CreatedFiles) -> None:
    """Copies a trace that cannot be read here unchanged: the analysis reports it, or may have more memory.

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
