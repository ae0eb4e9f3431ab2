"""Recognises recordings of other programs that ddpdoctor cannot read, by name or first bytes, and rejects them with advice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.formats import Candidate


class _Kind(msgspec.Struct, frozen=True):
    suffixes: Sequence[str]
    """Suffixes of file names, in lower case."""
    message: str
    """Text of the message after the file's name."""
    magic: Sequence[bytes] = ()
    """Byte strings that all occur in the first bytes of such files, whatever their names are."""
    converted_suffix: str = ""
    """Suffix of the converted file. If that exists next to the file, the file is ignored."""


_KINDS = (
    _Kind(
        (".nsys-rep", ".qdrep"),
        "is a report of Nsight Systems, which only its own programs read: run "
        "nsys export --type sqlite --include-blobs true {path} and name the .sqlite file.",
        converted_suffix=".sqlite",
    ),
    _Kind(
        (".qdstrm",),
        "is an unfinished report of Nsight Systems: run QdstrmImporter -i {path}, then nsys export --type sqlite on the report.",
        converted_suffix=".sqlite",
    ),
    _Kind(
        (".pftrace", ".perfetto-trace", ".perfetto", ".pftrace.gz"),
        "is a trace of Perfetto: run its traceconv json {path} {path}.json and name the JSON, or name what PyTorch's own "
        "profiler wrote.",
        converted_suffix=".json",
    ),
    _Kind(
        (".rocpd",),
        "is a database of ROCm's rocprofv3: record the steps with torch.profiler, whose traces are read on ROCm, too.",
        magic=(b"SQLite format 3\0", b"rocpd_"),
    ),
    _Kind(
        (),
        "comes from NCCL Inspector, which shows how long collectives took but not what ranks did in between: record the same steps "
        "with torch.profiler or Nsight Systems.",
        magic=(b'"header"', b'"coll_perf"', b'"coll_sn"'),
    ),
    _Kind(
        (".ncu-rep",),
        "is a report of Nsight Compute, which measures single kernels and no steps: record with Nsight Systems or torch.profiler.",
    ),
    _Kind(
        (".xplane.pb",),
        "is a profile of XLA or TensorFlow: ddpdoctor reads traces of torch.profiler and exports of Nsight Systems.",
    ),
)


def recognises(candidate: Candidate) -> bool:
    """See :class:`ddpdoctor.trace.formats.Format`."""
    kind = _kind(candidate)
    return kind is not None and not _is_converted(candidate.path, kind)


def read(path: str, rank: int | None) -> NoReturn:
    """Raises :class:`UnusableInput` with the message for the file."""
    del rank
    kind = _kind(Candidate(path))
    raise UnusableInput(f"{path} {kind.message.format(path=path) if kind else 'is not read'}")


def _kind(candidate: Candidate) -> _Kind | None:
    name = candidate.path.lower()
    for kind in _KINDS:
        if kind.suffixes and name.endswith(tuple(kind.suffixes)):
            return kind
        if kind.magic and (head := candidate.head) and all(mark in head for mark in kind.magic):
            return kind
    return None


def _is_converted(path: str, kind: _Kind) -> bool:
    """Whether the converted file exists next to the file at ``path``."""
    if not kind.converted_suffix:
        return False
    try:
        return any(
            Path(f"{base}{kind.converted_suffix}").is_file() for base in (path, path.rpartition(".")[0])
        )
    except (OSError, ValueError):
        return False
