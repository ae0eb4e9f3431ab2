"""The result of this package, and the search for dumps of torch's flight recorder by file name and content. A bad dump becomes a
sentence in ``notes``.

The modules that read dumps are imported only if a dump is found.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.measure.runfacts import HangFacts, Standing
from ddpdoctor.rundir import FilesBelow, files_below
from ddpdoctor.rundir.ends import JobEnd

if TYPE_CHECKING:
    from .recording import Recording

_RANK_IN_NAME = re.compile(r"(?:.*[^0-9])?(?<!_-)(\d{1,7})(?:\.(?:json|pkl|pickle|bin))?", re.IGNORECASE)
"""``_dump_9``, ``nccl_trace_rank_9``, ``rank9.json``: the last number is the rank; ``_dump_-1`` has none."""
_DUMP_NAME = re.compile(r"dump|trace|flight|nccl|(?:^|[^a-z])fr[_-]|rank", re.IGNORECASE)
"""Parts of the names of dumps. A pickle with another name is not read as a dump."""
_CERTAIN_DUMP_NAME = re.compile(r"dump|flight|nccl", re.IGNORECASE)
"""Names for which a note is written even if the file is not regular (a FIFO, a broken link)."""
_HEAD_BYTES = 1 << 16
_JSON_MARKS = (b'"collective_seq_id"', b'"pg_config"', b'"record_id"', b'"nccl_version"', b'"pg_status"')
_TRACE_MARKS = (b'"traceEvents"', b'"distributedInfo"', b'"schemaVersion"')
"""Keys at the beginning of a torch.profiler trace, which has some of a dump's keys in its distributedInfo."""
PICKLE = re.compile(rb"\x80[\x02-\x05]")


class StopVerdict(msgspec.Struct, frozen=True):
    """Why the job stopped, and the position of each rank. The defaults mean: not known to have stopped."""

    facts: HangFacts = msgspec.field(default_factory=HangFacts)
    standing: list[Standing] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    ended_by: str | None = None
    """Signal that ended the job from outside, unless it had failed before; "" if the signal is unknown. ``standing`` then has the last
    known positions."""
    requested: bool = False
    """Whether a launcher received and recorded that signal."""
    job: JobEnd = JobEnd()
    """The job's end according to its launchers."""


class Dumps(msgspec.Struct, frozen=True):
    """The dumps found, by rank, and a note on each dump that was skipped."""

    recordings: list[Recording]
    files: frozenset[str]
    """Paths of all dumps, including bad ones."""
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the job, from the groups' members; None without a dump."""
        from .groups import expected_ranks

        return len(expected_ranks(self.recordings)) or None

    @property
    def backend(self) -> str | None:
        """``nccl``, ``gloo``, ..., from the first operation that has one."""
        issued = (each for one in self.recordings for each in (*one.operations, *one.messages))
        return next((each.backend for each in issued if each.backend), None)


def find_dumps(paths: Sequence[str], below: Mapping[str, FilesBelow] | None = None) -> Dumps:
    """The dumps in ``paths`` (files, folders, patterns); other files are ignored. ``below``: listings of folders that were already read."""
    newest: dict[int, Recording] = {}
    files, notes = set(), []
    for path in paths:
        for file in _files(path, below or {}):
            rank = _rank_of(Path(file).name)
            if rank is None or not _looks_like_dump(file):
                continue
            from .recording import read_dump

            files.add(file)
            read = read_dump(file, rank)
            if isinstance(read, str):
                notes.append(read)
            elif rank in newest:
                older, newest[rank] = sorted((newest[rank], read), key=lambda each: each.last_ns or 0)
                notes.append(f"Rank {rank} has several flight recorder dumps; {older.path} is the older one.")
            else:
                newest[rank] = read
    return Dumps([newest[rank] for rank in sorted(newest)], frozenset(files), tuple(notes))


def _rank_of(name: str) -> int | None:
    found = _RANK_IN_NAME.fullmatch(name)
    return int(found[1]) if found else None


def _files(path: str, below: Mapping[str, FilesBelow]) -> Iterator[str]:
    """The file itself, the files of a folder, or those that match a pattern."""
    if path not in below and not os.path.isdir(path):  # noqa: PTH112
        found = [path] if os.path.isfile(path) else sorted(glob.glob(path))  # noqa: PTH113, PTH207
        yield from (file for file in found if os.path.isfile(file))  # noqa: PTH113
        return
    for file in (below.get(path) or files_below(path)).files:
        if os.path.isfile(file) or _CERTAIN_DUMP_NAME.search(Path(file).name):  # noqa: PTH113
            yield file


def _looks_like_dump(file: str) -> bool:
    if not os.path.isfile(file):  # noqa: PTH113
        return True
    has_dump_name = _DUMP_NAME.search(Path(file).name) is not None
    try:
        with open(file, "rb") as source:  # noqa: PTH123
            head = source.read(_HEAD_BYTES)
    except OSError:
        # read_dump reports why it cannot be read
        return _CERTAIN_DUMP_NAME.search(Path(file).name) is not None
    if not head or PICKLE.match(head):
        return has_dump_name
    has_marks = any(mark in head for mark in _JSON_MARKS) and not any(mark in head for mark in _TRACE_MARKS)
    return head.lstrip()[:1] in (b"{", b"[") and has_marks
