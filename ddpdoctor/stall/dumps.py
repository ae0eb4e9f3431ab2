"""Dumps of torch's flight recorder among files: found by name and content, read one by one; a bad one costs a sentence."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpdoctor.rundir.files import parsed, read_bounded

from .groups import expected_ranks
from .plainpickle import MOST_BYTES, NotPlainError, read_plain
from .recording import GroupKey, NoDumpError, Recording, recording_of

_NAMED = re.compile(r"(?:.*[^0-9])?(?<!_-)(\d{1,7})(?:\.(?:json|pkl|pickle|bin))?", re.IGNORECASE)
"""``_dump_9``, ``nccl_trace_rank_9``, ``rank9.json``: the last number is the rank; ``_dump_-1`` is nobody's."""
_MEANT = re.compile(r"dump|trace|flight|nccl|(?:^|[^a-z])fr[_-]|rank", re.IGNORECASE)
"""What names of dumps have in them: a pickle of another name is not taken for one."""
_DUMP = re.compile(r"dump|flight|nccl", re.IGNORECASE)
"""What is named so and is no file, such as a FIFO or a link to nothing, is told of."""
_HEAD_BYTES = 1 << 16
_JSON_MARKS = (b'"collective_seq_id"', b'"pg_config"', b'"record_id"', b'"nccl_version"', b'"pg_status"')
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
MOST_FILES = 100_000
"""Of one folder."""
_MOST_CONTAINERS, _MOST_VALUES = 2 << 20, 6 << 20
"""Of a dump in JSON: lists and objects, and all values. One of 64 MiB as torch writes them has a quarter of that; a file of nothing
but brackets would become a gigabyte of objects."""


@dataclass(frozen=True)
class Dumps:
    """The dumps at some paths, by rank, and what was left out, a sentence each."""

    recordings: list[Recording]
    files: frozenset[str]
    """All that were meant to be dumps, the bad ones too."""
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int | None:
        """Ranks of the job, as far as any group's members tell; None without a dump."""
        return len(expected_ranks(self.recordings)) or None

    @property
    def backend(self) -> str | None:
        """``nccl``, ``gloo``, ..., by what was issued."""
        issued = (each for one in self.recordings for each in (*one.operations, *one.messages))
        return next((each.backend for each in issued if each.backend), None)


def find_dumps(paths: Sequence[str]) -> Dumps:
    """The dumps in ``paths``, files and folders. What else lies there is no concern of this."""
    newest: dict[int, Recording] = {}
    files, notes = set(), []
    for path in paths:
        for file in _files(path):
            rank = _rank_of(Path(file).name)
            if rank is None or not _looks_like_one(file):
                continue
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


def read_dump(path: str, rank: int, known: Mapping[str, GroupKey] | None = None) -> Recording | str:
    """The dump in the file ``path``, or a sentence that says why there is none; ``known`` are groups that it need not tell."""
    try:
        data = read_bounded(path, MOST_BYTES, follow=True)
        if not data:
            return f"{path} is empty: rank {rank} was ended before it wrote its dump."
        document = read_plain(data) if _PICKLE.match(data) else _json(data)
        return recording_of(document, rank, path, os.stat(path).st_mtime_ns, known)  # noqa: PTH116
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
    except (NotPlainError, NoDumpError, ValueError) as error:
        reason = str(error)
    return f"{path} is left out as a flight recorder dump: {reason}."


def _json(data: bytes) -> Any:
    """Raises ValueError, with a reason in words."""
    containers = data.count(b"[") + data.count(b"{")
    if containers > _MOST_CONTAINERS or containers + data.count(b",") > _MOST_VALUES:
        raise ValueError("it holds more values than any recorder writes")
    return parsed(data)[0]


def _rank_of(name: str) -> int | None:
    found = _NAMED.fullmatch(name)
    return int(found[1]) if found else None


def _files(path: str) -> Iterator[str]:
    """The files that ``path`` stands for: itself, those of a folder, those of a pattern."""
    if not Path(path).is_dir():
        found = [path] if Path(path).is_file() else sorted(glob.glob(path))  # noqa: PTH207
        yield from (file for file in found if Path(file).is_file())
        return
    for parent, folders, names in os.walk(path):
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
        for name in sorted(names)[:MOST_FILES]:
            file = Path(parent, name)
            if not name.startswith(".") and (file.is_file() or _DUMP.search(name)):
                yield str(file)


def _looks_like_one(file: str) -> bool:
    if not Path(file).is_file():
        return True
    try:
        with open(file, "rb") as source:  # noqa: PTH123
            head = source.read(_HEAD_BYTES)
    except OSError:
        return False
    meant = _MEANT.search(Path(file).name) is not None
    if not head or _PICKLE.match(head):
        return meant
    return head.lstrip()[:1] in (b"{", b"[") and any(mark in head for mark in _JSON_MARKS)
