"""Reads the flight recorder dump of one rank, of any torch version: process groups and the operations issued in each. Also converts stacks
of dumps and run directories to lines of the user's program with their callers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import msgspec

from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.rundir.files import parsed, read_bounded
from ddpdoctor.rundir.packages import TextFrame, is_library

from .dumps import PICKLE
from .plainpickle import MOST_BYTES, MOST_CONTAINERS, NotPlainError, read_plain

_MOST_VALUES = 6 << 20
"""Most values of a dump in JSON: four times those of a 64 MiB dump written by torch."""


def read_dump(path: str, rank: int, known: Mapping[str, GroupKey] | None = None) -> Recording | str:
    """The dump in the file ``path``, or a sentence why it cannot be read. ``known``: groups that the dump may omit."""
    try:
        data = read_bounded(path, MOST_BYTES, follow=True)
        if not data:
            return f"{path} is empty: rank {rank} was ended before it wrote its dump."
        document = read_plain(data) if PICKLE.match(data) else _json(data)
        return recording_of(document, rank, path, os.stat(path).st_mtime_ns, known)  # noqa: PTH116
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
    except (NotPlainError, NoDumpError, ValueError) as error:
        reason = str(error)
    return f"{path} is left out as a flight recorder dump: {reason}."


def _json(data: bytes) -> Any:
    """Decodes JSON. Raises ValueError with the reason as text."""
    containers = data.count(b"[") + data.count(b"{")
    if containers > MOST_CONTAINERS or containers + data.count(b",") > _MOST_VALUES:
        raise ValueError("it holds more values than any recorder writes")
    return parsed(data)[0]


MOST_ENTRIES = 1_000_000
"""Most entries of one dump; torch keeps 2,000 by default."""
_MOST_RANKS = 1_000_000
_MOST_MEMBERS = 4_000_000
"""Most members of all groups of one dump together."""
_MOST_LETTERS, _MOST_PATH = 200, 4096
"""Most characters of a name and of a path; longer ones are ignored."""
_MOST_TENSORS, _MOST_DIMENSIONS, _MOST_FRAMES = 4096, 64, 512
MOST_CALLERS = 8
"""Most callers of a line, as in stack samples."""
MOST_FRAMES = 64
"""Most frames of a stack in a report."""
DEFAULT_DESCRIPTION = "default_pg"
"""torch's description of the group of all ranks."""
_MAX_NUMBER = 1 << 62
"""Upper bound of numbers and of epoch nanoseconds (the year 2116)."""
_P2P = re.compile(r"(send|recv)\b(?: (\d+)(->|<-)(\d+))?")
_COALESCED = "coalesced"
_FINISHED = "completed"


class NoDumpError(ValueError):
    """The document is not a flight recorder dump. The message gives the reason as part of a sentence."""


class Operation(msgspec.Struct, frozen=True):
    """One operation that a rank issued."""

    group: GroupKey
    sequence: int
    """Sequence number among the group's collectives; a send or receive has that of the preceding collective."""
    name: str
    """torch's name without the backend: ``all_reduce``, ``send 0->1``."""
    backend: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    pending: bool
    """Issued and not finished."""
    created_ns: int | None
    order: int
    """Index among all operations of the rank."""
    pair: tuple[int, int] | None = None
    """(sender, receiver) of a send or receive, as ranks within the group."""
    frames: tuple[CodeLine, ...] = ()
    """Innermost first."""

    @property
    def input_elements(self) -> int:
        return sum(map(prod, self.inputs))

    @property
    def output_elements(self) -> int:
        return sum(map(prod, self.outputs))


class GroupKey(msgspec.Struct, frozen=True):
    """A process group. Ranks that split a group may have several with the same name; each rank knows only its own."""

    name: str
    description: str = ""
    members: tuple[int, ...] | None = None
    """Global ranks; None if the dump does not list them."""

    def __hash__(self) -> int:
        """Uses only the first member: keys are looked up for every operation, and a group may have many members."""
        members = self.members or ()
        return hash((self.name, self.description, len(members), members[:1]))

    @property
    def words(self) -> str:
        """The group's name in reports."""
        described = self.description if self.description not in ("", "undefined", self.name) else ""
        named = f"group {self.name}" if self.name.isdecimal() else self.name
        return f"{described} ({named})" if described else named


class Recording(msgspec.Struct, frozen=True):
    """One rank's dump."""

    rank: int
    path: str
    groups: dict[str, GroupKey]
    """The rank's groups by name."""
    operations: list[Operation]
    """Collectives, in the order in which they were issued."""
    messages: list[Operation]
    """Sends and receives."""
    enqueued: dict[GroupKey, int] = msgspec.field(default_factory=dict)
    """Number of the last operation of each group by torch's own count, which includes sends and receives."""
    first_ns: int | None = None
    """When the oldest operation in the dump was issued, epoch ns."""
    overwritten: bool = False
    """Whether older operations were overwritten."""
    written_ns: int | None = None
    is_listed: bool = True
    """Whether it lists operations, so that operations not listed as unfinished are finished; otherwise it has only numbers."""

    @property
    def pending(self) -> list[Operation]:
        """Operations issued and not finished, in the order of issue."""
        issued = (*self.operations, *self.messages)
        return sorted((each for each in issued if each.pending), key=lambda each: each.order)

    @property
    def last_ns(self) -> int | None:
        """When the newest operation in the dump was issued, epoch ns."""
        moments = [each.created_ns for each in (*self.operations[-1:], *self.messages[-1:])]
        return max((moment for moment in moments if moment is not None), default=None)


def recording_of(
    document: Any,
    rank: int,
    path: str,
    written_ns: int | None = None,
    known: Mapping[str, GroupKey] | None = None,
) -> Recording:
    """Parses the dump in ``document``. ``known``: groups that the dump may omit. Raises :class:`NoDumpError`."""
    if isinstance(document, list):
        document = {"entries": document}
    if not isinstance(document, Mapping) or not isinstance(document.get("entries", ()), list | tuple):
        raise NoDumpError("it is no dump of torch's flight recorder")
    if not document.keys() & {"entries", "pg_config", "pg_status", "version"}:
        raise NoDumpError("it is no dump of torch's flight recorder")
    groups = {**(known or {}), **_groups(document.get("pg_config"))}
    collectives: list[Operation] = []
    messages: list[Operation] = []
    ids: dict[int, GroupKey] = {}
    entries = [e for e in document.get("entries", ()) if isinstance(e, Mapping)][:MOST_ENTRIES]
    for entry in entries:
        operation = _operation(entry, groups, len(collectives) + len(messages))
        if operation is None:
            continue
        number = entry.get("pg_id")
        if isinstance(number, int):
            ids[number] = operation.group
        is_message = bool(entry.get("is_p2p")) or operation.pair is not None or _P2P.match(operation.name)
        (messages if is_message else collectives).append(operation)
    collectives = _without_batches(collectives, messages)
    enqueued = _enqueued_counts(document.get("pg_status"), groups, ids)
    oldest = min((_integer(entry.get("record_id", entry.get("id"))) or 0 for entry in entries), default=0)
    moments = [each.created_ns for each in (*collectives, *messages) if each.created_ns is not None]
    return Recording(
        rank=rank,
        path=path,
        groups=groups,
        operations=collectives,
        messages=messages,
        enqueued=enqueued,
        first_ns=min(moments, default=None),
        overwritten=oldest > 0,
        written_ns=written_ns,
    )


def _without_batches(collectives: list[Operation], messages: list[Operation]) -> list[Operation]:
    """``collectives`` without the entries that end a batch of sends and receives: not all ranks of the group take part."""
    batches = {(each.group, each.sequence) for each in messages}
    return [
        each for each in collectives if each.name != _COALESCED or (each.group, each.sequence) not in batches
    ]


def _groups(config: Any) -> dict[str, GroupKey]:
    if not isinstance(config, Mapping):
        return {}
    found, left = {}, _MOST_MEMBERS
    for key, about in config.items():
        name = _text(key)
        if not isinstance(about, Mapping) or (not name and key != ""):
            continue
        members = _members(about.get("ranks"))
        if members and len(members) <= left:
            left -= len(members)
            found[name] = GroupKey(name, _text(about.get("desc")), members)
    return found


def _members(ranks: Any) -> tuple[int, ...] | None:
    """Global ranks; torch writes them as the text of a list."""
    if isinstance(ranks, str):
        try:
            ranks = parsed(ranks.encode())[0]
        except ValueError:
            return None
    if not isinstance(ranks, list | tuple) or len(ranks) > _MOST_RANKS:
        return None
    members = [
        number for each in ranks if (number := _integer(each)) is not None and 0 <= number < _MOST_RANKS
    ]
    return tuple(members) if len(members) == len(ranks) else None


def _operation(entry: Mapping[str, Any], groups: Mapping[str, GroupKey], order: int) -> Operation | None:
    group = entry.get("process_group")
    name, description = _text(entry.get("pg_name", entry.get("pg_id"))), ""
    if isinstance(group, list | tuple) and group:
        name, description = _text(group[0]), _text(group[1]) if len(group) > 1 else ""
    sequence = _integer(entry.get("collective_seq_id", entry.get("seq_id")))
    called = entry.get("profiling_name")
    if sequence is None or not isinstance(called, str):
        return None
    backend, _, operation = called[:200].rpartition(":")
    pair = _P2P.match(operation)
    return Operation(
        group=groups.get(name) or GroupKey(name, description),
        sequence=sequence,
        name=operation,
        backend=backend,
        inputs=_sizes(entry.get("input_sizes")),
        outputs=_sizes(entry.get("output_sizes")),
        input_dtypes=_texts(entry.get("input_dtypes")),
        pending=entry.get("state") != _FINISHED and not entry.get("retired"),
        created_ns=_integer(entry.get("time_created_ns")),
        order=order,
        pair=_pair(pair),
        frames=tuple(_lines(entry.get("frames"))),
    )


def _pair(found: re.Match[str] | None) -> tuple[int, int] | None:
    """Sender and receiver of ``send 0->1`` or ``recv 1<-0``."""
    if found is None or found[3] is None:
        return None
    left, right = int(found[2][:9]), int(found[4][:9])
    return (left, right) if found[3] == "->" else (right, left)


def _enqueued_counts(
    status: Any, groups: Mapping[str, GroupKey], ids: Mapping[int, GroupKey]
) -> dict[GroupKey, int]:
    """torch's own counts by group."""
    if not isinstance(status, Mapping):
        return {}
    by_id = {number: about for key, about in status.items() if (number := _integer(key)) is not None}
    enqueued = {}
    for number, group in _groups_by_number(sorted(by_id), groups, ids).items():
        about = by_id[number]
        count = _integer(about.get("last_enqueued_collective")) if isinstance(about, Mapping) else None
        if count is not None and count >= 0:
            enqueued[group] = count
    return enqueued


def _groups_by_number(
    numbers: list[int], groups: Mapping[str, GroupKey], ids: Mapping[int, GroupKey]
) -> dict[int, GroupKey]:
    """Number of a group within its process → the group. Both numbers and names are assigned in the order of creation, so they are paired in
    that order if there are equally many of them and the issued operations agree."""
    known = {number: ids[number] for number in numbers if number in ids}
    names = [name for name in groups if name.isdecimal()]
    if len(names) != len(groups) or len(names) != len(numbers):
        return known
    paired = dict(zip(numbers, (groups[name] for name in sorted(names, key=int)), strict=True))
    return paired if all(paired[number] == key for number, key in known.items()) else known


def _integer(value: Any) -> int | None:
    """An integer, which may be text in JSON; None if out of range."""
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,19}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -1 <= value < _MAX_NUMBER else None


def _text(value: Any, most: int = _MOST_LETTERS) -> str:
    """A string, or an integer as a string; "" for any other value."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if abs(value) < _MAX_NUMBER else ""
    return value if isinstance(value, str) and len(value) <= most else ""


def _sizes(sizes: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(sizes, list | tuple):
        return ()
    return tuple(
        tuple(number for each in size[:_MOST_DIMENSIONS] if (number := _integer(each)) is not None)
        for size in sizes[:_MOST_TENSORS]
        if isinstance(size, list | tuple)
    )


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list | tuple):
        return ()
    return tuple(text[:40] for value in values[:_MOST_TENSORS] if (text := _text(value)))


def _lines(frames: Any) -> Iterator[CodeLine]:
    for frame in frames[:_MOST_FRAMES] if isinstance(frames, list | tuple) else ():
        file = frame.get("filename") if isinstance(frame, Mapping) else None
        if isinstance(file, str) and 0 < len(file) <= _MOST_PATH:
            yield CodeLine(
                file, max(_integer(frame.get("line")) or 0, 0), _text(frame.get("name"), _MOST_PATH)
            )


def lines_of(frames: Any) -> list[CodeLine]:
    """``[[file, line, function], ...]`` of a run directory as lines, the innermost first."""
    lines = []
    for frame in frames if isinstance(frames, list) else ():
        match frame:
            case [str(file), int() | None as line, str() | None as function] if file and (line or 0) >= 0:
                lines.append(CodeLine(file, line or 0, function or ""))
    return lines[:MOST_FRAMES]


def is_user_line(line: CodeLine) -> bool:
    """Whether its path is in the user's program."""
    return not is_library(line.file)


def place_of(stack: Sequence[CodeLine]) -> Where | None:
    """The innermost line of the user's program in a stack, with its callers; None if there is none."""
    own = [line for line in stack if is_user_line(line)]
    if not own:
        return None
    first, *callers = own
    return Where(first.file, first.line, first.function, callers=tuple(callers[:MOST_CALLERS]))


def distinct_places(places: Sequence[Where | None]) -> list[Where]:
    """``places`` without None and duplicates."""
    seen: dict[tuple[str, int], Where] = {}
    for place in places:
        if place is not None:
            seen.setdefault((place.file, place.line), place)
    return list(seen.values())


def stack_of(frames: Sequence[TextFrame]) -> list[CodeLine]:
    """Frames of faulthandler's text as lines, the innermost first."""
    return [CodeLine(file, line, function) for file, line, function in frames[:MOST_FRAMES]]
