"""Recordings by process group: the last and the pending collectives of each member, and the first sequence number at which members
issued different collectives, with the ranks that deviate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from enum import StrEnum

import msgspec

from .calls import due
from .recording import DEFAULT_DESCRIPTION, GroupKey, Operation, Recording

_DEFAULT = ("0", DEFAULT_DESCRIPTION)
"""Name and description of the group of all ranks."""


class MemberRecord(msgspec.Struct):
    """One member of a group, from its own recording."""

    by_sequence: dict[int, list[Operation]] = msgspec.field(default_factory=dict)
    """Issued operations by sequence number. Several operations with the same number are one coalesced collective."""
    pending: dict[int, Operation] = msgspec.field(default_factory=dict)
    last: int | None = None
    """Sequence number of its last issued collective; None if the recording has none of the group."""


class Table(msgspec.Struct):
    """A process group, with a record for each member that has a recording."""

    key: GroupKey
    members: tuple[int, ...]
    """If no recording lists the members, the ranks with a recording of the group."""
    records: dict[int, MemberRecord] = msgspec.field(default_factory=dict)

    @property
    def unrecorded(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.records]

    def operation(self, sequence: int) -> Operation | None:
        """The operation with this number on the first member that issued it."""
        issued = (record.by_sequence.get(sequence) for record in self.records.values())
        return next((operations[0] for operations in issued if operations), None)


def tables_of(recordings: Sequence[Recording], all_ranks: Sequence[int]) -> list[Table]:
    """One table for each group of at least two ranks with a recorded operation. ``all_ranks``: the job's ranks, the members of the
    default group if no recording lists them."""
    named = _groups_by_name(recordings)
    tables: dict[GroupKey, Table] = {}
    for key in {key for keys in named.values() for key in keys}:
        is_default = key.name in _DEFAULT or key.description in _DEFAULT
        tables[key] = Table(key, key.members or (tuple(all_ranks) if is_default else ()))
    counted = _exactly_counted_groups(recordings, named)
    for recording in recordings:
        _add_recording(recording, tables, named, counted)
    for table in tables.values():
        table.members = table.members or tuple(sorted(table.records))
        table.records = {rank: record for rank, record in table.records.items() if rank in table.members}
    return [tables[key] for key in sorted(tables, key=_order) if len(tables[key].members) > 1]


def _exactly_counted_groups(
    recordings: Sequence[Recording], named: dict[str, list[GroupKey]]
) -> set[GroupKey]:
    """Groups in which torch's own count equals that of the collectives. In other groups it includes sends and receives."""
    fits: dict[GroupKey, bool] = {}
    for recording in recordings:
        last: dict[GroupKey, int] = {}
        for operation in recording.operations:
            last[operation.group] = max(operation.sequence, last.get(operation.group, -1))
        mixed = {message.group for message in recording.messages}
        for group, count in recording.enqueued.items():
            key = _group_of_rank(group, recording.rank, named)
            fits[key] = fits.get(key, True) and group not in mixed and last.get(group, count) == count
        for group in mixed:
            fits[_group_of_rank(group, recording.rank, named)] = False
    return {key for key, whole in fits.items() if whole}


def _add_recording(
    recording: Recording,
    tables: dict[GroupKey, Table],
    named: dict[str, list[GroupKey]],
    counted: set[GroupKey],
) -> None:
    """Adds the recording's rank to ``tables``."""
    for key, table in tables.items():
        if recording.rank in (key.members or table.members):
            table.records[recording.rank] = MemberRecord()
    for operation in recording.operations:
        key = _group_of_rank(operation.group, recording.rank, named)
        record = tables[key].records.setdefault(recording.rank, MemberRecord())
        record.by_sequence.setdefault(operation.sequence, []).append(operation)
        if operation.pending:
            record.pending.setdefault(operation.sequence, operation)
        record.last = max(record.last if record.last is not None else -1, operation.sequence)
    for group, count in recording.enqueued.items():
        key = _group_of_rank(group, recording.rank, named)
        found = tables[key].records.get(recording.rank)
        if found is not None and key in counted:
            found.last = max(count, found.last if found.last is not None else -1)


def _groups_by_name(recordings: Sequence[Recording]) -> dict[str, list[GroupKey]]:
    """Known groups by name. Groups with unknown members are dropped if another one has the same name."""
    keys: dict[str, dict[GroupKey, None]] = {}
    for recording in recordings:
        issued = (operation.group for operation in recording.operations)
        for key in (*recording.groups.values(), *issued, *recording.enqueued):
            keys.setdefault(key.name, {})[key] = None
    return {name: [k for k in found if k.members] or list(found) for name, found in keys.items()}


def _group_of_rank(key: GroupKey, rank: int, named: dict[str, list[GroupKey]]) -> GroupKey:
    """The group with this name that contains ``rank``."""
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


class Difference(StrEnum):
    """Kind of difference."""

    EXTRA = "extra"
    """The odd ranks issue an additional collective."""
    LACKING = "lacking"
    """The odd ranks skip a collective."""
    ORDER = "order"
    """Ranks issue the same two collectives in different order."""
    OPERATION = "operation"
    SHAPE = "shape"
    DTYPE = "dtype"


class Mismatch(msgspec.Struct, frozen=True):
    """The first difference in a group."""

    group: GroupKey
    sequence: int
    difference: Difference
    odd: tuple[int, ...]
    """Ranks that deviate from the majority, or from the group's past; all ranks if undecided."""
    others: tuple[int, ...]
    by_rank: dict[int, Operation]

    @property
    def since_ns(self) -> int | None:
        moments = [each.created_ns for each in self.by_rank.values() if each.created_ns is not None]
        return max(moments, default=None)


_Signature = tuple[tuple[str, tuple[str, ...], int], ...]

_EQUAL_INPUTS = frozenset(
    ("all_reduce", "all_reduce_barrier", "broadcast", "reduce", "allreduce_coalesced", "_all_gather_base")
)
"""Collectives whose inputs must have the same number of elements on all ranks."""
_EQUAL_OUTPUTS = frozenset(("all_gather", "_reduce_scatter_base"))
"""Collectives whose outputs must have the same number. In all others (all_to_all, gather, scatter) sizes may differ by rank."""
_ONLY_NAMES = frozenset(("barrier", "all_reduce_barrier"))
"""Collectives without data of the job: only their names are compared."""


def first_differences(tables: Sequence[Table]) -> list[Mismatch]:
    """One mismatch for each group with a pending collective at or after its first difference, in order of time."""
    found = (_first_mismatch(table) for table in tables)
    return sorted((each for each in found if each is not None), key=lambda each: each.since_ns or 0)


def _first_mismatch(table: Table) -> Mismatch | None:
    records = {rank: record for rank, record in table.records.items() if record.by_sequence}
    pending = [max(record.pending) for record in records.values() if record.pending]
    if len(records) < 2 or not pending:
        return None
    for sequence in sorted({number for record in records.values() for number in record.by_sequence}):
        if sequence > max(pending):
            return None
        issued = {
            r: record.by_sequence[sequence] for r, record in records.items() if sequence in record.by_sequence
        }
        signatures = {rank: _signature(operations) for rank, operations in issued.items()}
        if len(set(signatures.values())) > 1:
            return _mismatch_at(table, sequence, signatures, {r: each[0] for r, each in issued.items()})
    return None


def _signature(operations: Sequence[Operation]) -> _Signature:
    """Properties that must be equal on all ranks."""
    return tuple((each.name, _dtypes(each), _elements(each)) for each in operations)


def _dtypes(operation: Operation) -> tuple[str, ...]:
    empty = operation.inputs and operation.input_elements == 0
    return () if operation.name in _ONLY_NAMES or empty else tuple(sorted(set(operation.input_dtypes)))


def _elements(operation: Operation) -> int:
    if operation.name in _ONLY_NAMES:
        return -1
    if operation.name in _EQUAL_INPUTS:
        return operation.input_elements
    return operation.output_elements if operation.name in _EQUAL_OUTPUTS else -1


def _mismatch_at(
    table: Table, sequence: int, signatures: dict[int, _Signature], issued: dict[int, Operation]
) -> Mismatch:
    counts = Counter(signatures.values())
    (first, most), *rest = counts.most_common()
    usual = _due(table, sequence, counts) if rest and rest[0][1] == most else first
    odd = tuple(sorted(rank for rank, each in signatures.items() if usual is None or each != usual))
    others = tuple(sorted(rank for rank in signatures if rank not in odd))
    return Mismatch(
        table.key,
        sequence,
        _difference(table, sequence, odd or tuple(signatures), others, signatures),
        odd,
        others,
        issued,
    )


def _due(table: Table, sequence: int, signatures: Collection[_Signature]) -> _Signature | None:
    """The signature expected from the group's past, in the longest recording: by its period, or because no other one followed
    the preceding collective before. None if undecided."""
    known = max(table.records.values(), key=lambda record: len(record.by_sequence))
    past = {number: _signature(each) for number, each in known.by_sequence.items() if number < sequence}
    before = {each: [number for number, other in past.items() if other == each] for each in signatures}
    found = due(before, sequence)
    if found is not None or sequence - 1 not in past:
        return found
    after = {
        past[number]
        for number in past
        if past.get(number - 1) == past[sequence - 1] and past[number] in before
    }
    return after.pop() if len(after) == 1 else None


def _difference(
    table: Table,
    sequence: int,
    odd: tuple[int, ...],
    others: tuple[int, ...],
    signatures: dict[int, _Signature],
) -> Difference:
    one = odd[0]
    other = others[0] if others else next(r for r in odd if signatures[r] != signatures[one])
    mine, theirs = (_signature_at(table, rank, sequence) for rank in (one, other))
    my_next, their_next = (_signature_at(table, rank, sequence + 1) for rank in (one, other))
    alike = mine is not None and theirs is not None and mine[0][0] == theirs[0][0]
    if mine and theirs and alike and mine[0][1] != theirs[0][1]:
        return Difference.DTYPE
    if alike and my_next == their_next:
        return Difference.SHAPE
    theirs_is_my_next = my_next is not None and my_next == theirs
    mine_is_their_next = their_next is not None and their_next == mine
    if theirs_is_my_next:
        return Difference.ORDER if mine_is_their_next else Difference.EXTRA
    if mine_is_their_next:
        return Difference.LACKING
    return Difference.SHAPE if alike else Difference.OPERATION


def _signature_at(table: Table, rank: int, sequence: int) -> _Signature | None:
    operations = table.records[rank].by_sequence.get(sequence)
    return _signature(operations) if operations else None
