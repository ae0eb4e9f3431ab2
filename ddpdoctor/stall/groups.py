"""Recordings by process group: the last collective of each member, and what it has pending."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from .recording import DEFAULT_DESCRIPTION, GroupKey, Operation, Recording

_DEFAULT = ("0", DEFAULT_DESCRIPTION)
"""Name and description of the group of all ranks."""


class Seat(msgspec.Struct):
    """One member of a group, from its own recording."""

    by_sequence: dict[int, list[Operation]] = msgspec.field(default_factory=dict)
    """Issued operations by sequence number; several with one number are one coalesced collective."""
    pending: dict[int, Operation] = msgspec.field(default_factory=dict)
    last: int | None = None
    """Sequence number of the last collective that it issued; None if the recording has none of the group."""


class Table(msgspec.Struct):
    """A process group, with a seat for each member that has a recording."""

    key: GroupKey
    members: tuple[int, ...]
    seats: dict[int, Seat] = msgspec.field(default_factory=dict)
    members_known: bool = True
    """Whether a recording lists the members; else ``members`` are the ranks with a recording of the group."""

    @property
    def unrecorded(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.seats]

    def operation(self, sequence: int, ranks: Iterable[int]) -> Operation | None:
        """The operation of this number by the first of ``ranks`` that issued it."""
        issued = (self.seats[rank].by_sequence.get(sequence) for rank in ranks if rank in self.seats)
        return next((operations[0] for operations in issued if operations), None)


def tables_of(recordings: Sequence[Recording], all_ranks: Sequence[int]) -> list[Table]:
    """A table for each group of at least two ranks with a recorded operation. ``all_ranks``: the job's ranks, the members of the default
    group if no recording lists them."""
    named = _named(recordings)
    tables: dict[GroupKey, Table] = {}
    for key in {key for keys in named.values() for key in keys}:
        members = key.members
        if members is None:
            members = tuple(all_ranks) if key.name in _DEFAULT or key.description in _DEFAULT else ()
        tables[key] = Table(key, members, members_known=key.members is not None)
    counted = _counted(recordings, named)
    for recording in recordings:
        _seat(recording, tables, named, counted)
    for table in tables.values():
        if not table.members_known and not table.members:
            table.members = tuple(sorted(table.seats))
        table.seats = {rank: seat for rank, seat in table.seats.items() if rank in table.members}
    return [tables[key] for key in sorted(tables, key=_order) if len(tables[key].members) > 1]


def _counted(recordings: Sequence[Recording], named: dict[str, list[GroupKey]]) -> set[GroupKey]:
    """Groups in which torch's own count equals that of the collectives; elsewhere it includes sends and receives."""
    fits: dict[GroupKey, bool] = {}
    for recording in recordings:
        last: dict[GroupKey, int] = {}
        for operation in recording.operations:
            last[operation.group] = max(operation.sequence, last.get(operation.group, -1))
        mixed = {message.group for message in recording.messages}
        for group, count in recording.enqueued.items():
            key = _resolved(group, recording.rank, named)
            fits[key] = fits.get(key, True) and group not in mixed and last.get(group, count) == count
        for group in mixed:
            fits[_resolved(group, recording.rank, named)] = False
    return {key for key, whole in fits.items() if whole}


def _seat(
    recording: Recording,
    tables: dict[GroupKey, Table],
    named: dict[str, list[GroupKey]],
    counted: set[GroupKey],
) -> None:
    """Add the recording's rank to ``tables``."""
    for key, table in tables.items():
        if recording.rank in (key.members or table.members):
            table.seats[recording.rank] = Seat()
    for operation in recording.operations:
        key = _resolved(operation.group, recording.rank, named)
        seat = tables[key].seats.setdefault(recording.rank, Seat())
        seat.by_sequence.setdefault(operation.sequence, []).append(operation)
        if operation.pending:
            seat.pending.setdefault(operation.sequence, operation)
        seat.last = max(seat.last if seat.last is not None else -1, operation.sequence)
    for group, count in recording.enqueued.items():
        key = _resolved(group, recording.rank, named)
        found = tables[key].seats.get(recording.rank)
        if found is not None and key in counted:
            found.last = max(count, found.last if found.last is not None else -1)


def _named(recordings: Sequence[Recording]) -> dict[str, list[GroupKey]]:
    """Known groups by name; without those of unknown members if there are others of the same name."""
    keys: dict[str, dict[GroupKey, None]] = {}
    for recording in recordings:
        issued = (operation.group for operation in recording.operations)
        for key in (*recording.groups.values(), *issued, *recording.enqueued):
            keys.setdefault(key.name, {})[key] = None
    return {name: [k for k in found if k.members] or list(found) for name, found in keys.items()}


def _resolved(key: GroupKey, rank: int, named: dict[str, list[GroupKey]]) -> GroupKey:
    """The group of this name that ``rank`` is in."""
    known = named.get(key.name, [])
    if key in known:
        return key
    return next((other for other in known if rank in (other.members or ())), known[0] if known else key)


def _order(key: GroupKey) -> tuple[int, str]:
    return (int(key.name) if key.name.isdecimal() and len(key.name) < 19 else -1, key.name)


def expected_ranks(recordings: Sequence[Recording]) -> list[int]:
    """All ranks of the job, from recordings and the groups' members."""
    groups = {key.members or () for recording in recordings for key in recording.groups.values()}
    return sorted({recording.rank for recording in recordings}.union(*groups))
