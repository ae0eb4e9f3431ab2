"""The wait graph of the process groups: which ranks wait for which, and which block the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from .groups import Table
from .recording import GroupKey, Operation, Recording

_SLACK_NS = 5_000_000_000
"""A dump written this long before others issued a collective does not show whether its rank issued it: watchdogs poll about once
a second, and file servers' clocks differ."""


class Stuck(msgspec.Struct, frozen=True):
    """A collective in which some ranks wait."""

    group: GroupKey
    sequence: int
    operation: Operation
    """The operation of the first waiting rank."""
    waiting: tuple[int, ...]
    missing: tuple[int, ...] = ()
    """Members whose recording shows that they have not issued it."""
    unknown: tuple[int, ...] = ()
    """Members without a recording, or with an older one."""

    @property
    def absent(self) -> tuple[int, ...]:
        return self.missing or self.unknown

    @property
    def since_ns(self) -> int | None:
        return self.operation.created_ns

    def is_of(self, operation: Operation) -> bool:
        """Whether ``operation`` is a rank's part of this collective."""
        return (
            operation.pair is None
            and operation.sequence == self.sequence
            and operation.group.name == self.group.name
        )


def stuck_collectives(
    tables: Sequence[Table], recordings: Mapping[int, Recording]
) -> tuple[list[Stuck], list[Stuck]]:
    """(collectives that some members have not issued, collectives in which all members wait), each in order of time."""
    missed: list[Stuck] = []
    all_waiting: list[Stuck] = []
    for table in tables:
        here = _missed_collectives(table, recordings)
        missed += here
        if not here and (shared := _pending_on_all(table)):
            all_waiting += _stuck_at(table, min(shared), [], [])
    return sorted(missed, key=_time_key), sorted(all_waiting, key=_time_key)


def _time_key(stuck: Stuck) -> tuple[int, int]:
    return (stuck.since_ns or 0, -len(stuck.waiting))


def _missed_collectives(table: Table, recordings: Mapping[int, Recording]) -> list[Stuck]:
    """The collectives of one group that some members have not issued: for each of these members, the first pending one after its last."""
    records = table.records
    pending = sorted({number for record in records.values() for number in record.pending})
    if not pending:
        return []
    highest = {rank: max(record.pending, default=-1) for rank, record in records.items()}
    far = max(highest.values())
    by_place: dict[int, list[int]] = {}
    for rank, record in records.items():
        last = -1 if record.last is None else record.last
        if last < far and not record.pending.keys() & {far}:
            place = next((number for number in pending if number > last), None)
            if place is not None:
                by_place.setdefault(place, []).append(rank)
    found = []
    for place, ranks in by_place.items():
        known = [rank for rank in ranks if _would_be_recorded(recordings[rank], table, place)]
        unknown = [*(rank for rank in ranks if rank not in known), *table.unrecorded]
        found += _stuck_at(table, place, known, unknown)
    if not by_place and table.unrecorded:
        # A collective that one member has finished was issued by all.
        place = next((n for n in pending if all(n in record.pending for record in records.values())), -1)
        found += _stuck_at(table, place, [], table.unrecorded)
    return found


def _stuck_at(table: Table, place: int, missing: Sequence[int], unknown: Sequence[int]) -> list[Stuck]:
    waiting = [rank for rank, record in table.records.items() if place in record.pending]
    if not waiting:
        return []
    issued = (table.records[rank].pending[place] for rank in waiting)
    first = min(issued, key=lambda each: each.created_ns or 0)
    groups = (tuple(sorted(ranks)) for ranks in (waiting, missing, unknown))
    return [Stuck(table.key, place, first, *groups)]


def _would_be_recorded(recording: Recording, table: Table, place: int) -> bool:
    """Whether the collective would be in the recording if its rank had issued it."""
    issued = table.operation(place)
    if issued is None or issued.created_ns is None:
        return True
    if (
        recording.written_ns is not None
        and recording.written_ns < issued.created_ns - _SLACK_NS
        and recording.last_ns is not None
        and recording.written_ns >= recording.last_ns
    ):
        return False
    record = table.records[recording.rank]
    overwritten = recording.overwritten and (recording.first_ns or 0) > issued.created_ns
    return record.last is not None or not overwritten


def _pending_on_all(table: Table) -> set[int]:
    """Sequence numbers of collectives that all members have issued and none has finished."""
    records = list(table.records.values())
    if len(records) < len(table.members) or not records:
        return set()
    return set.intersection(*(set(record.pending) for record in records))


class Partner(msgspec.Struct, frozen=True):
    """A rank with which another has sends or receives pending."""

    rank: int
    lacks: bool
    """Whether it has not issued its part of all of them, according to its own recording."""


def partners_of(recordings: Mapping[int, Recording]) -> dict[int, list[Partner]]:
    """Rank → its partners in pending sends and receives."""
    open_: Counter[tuple[int, int, int]] = Counter()
    for recording in recordings.values():
        for message in recording.messages:
            pair = _global_pair(message)
            if message.pending and pair and recording.rank in pair:
                open_[(recording.rank, *pair)] += 1
    found: dict[int, list[Partner]] = {}
    for (rank, sender, receiver), many in open_.items():
        other = receiver if rank == sender else sender
        lacks = other not in recordings or open_[(other, sender, receiver)] < many
        found.setdefault(rank, []).append(Partner(other, lacks))
    return found


def _global_pair(message: Operation) -> tuple[int, int] | None:
    """Sender and receiver as global ranks."""
    members, pair = message.group.members, message.pair
    if pair is None or members is None:
        return pair
    return (members[pair[0]], members[pair[1]]) if max(pair) < len(members) else None


_LEAST_PEERS = 3
"""Fewest ranks that wait in the same collective and have issued more, all of them equally many, from which a rank that has not is
reported as stopped: two hosts may run ahead of their devices by different amounts."""
_PRINTING_RANK = 0
"""In most jobs this rank reads results to print them, so it may stop before the others."""


class RootReason(StrEnum):
    """Reason why a rank is a root."""

    NOT_ISSUED = "not issued"
    """Its recording shows that it has not issued the collective and waits for no rank."""
    STOPPED_EARLY = "stopped early"
    """It waits too, but ranks that wait for the same have issued more."""
    NO_RECORDING = "no recording"
    """Others may wait for it, but it left no recording or an old one: whether it arrived is unknown."""
    CIRCLE = "circle"
    """It and others wait for each other."""
    UNFINISHED = "unfinished"
    """It has collectives pending that all others have finished."""
    NO_MESSAGE = "no message"
    """It has not issued its part of a send or receive."""


class Root(msgspec.Struct, frozen=True):
    """A rank that blocks others and is blocked by none."""

    rank: int
    why: RootReason
    stuck: Stuck | None
    """The first collective at which others wait for it."""
    unfinished: tuple[Operation, ...] = ()
    """Its pending operations that others have finished: its device, or the thread that watches it, had stopped."""
    partner: int | None = None
    """The rank that waits for its message."""


class BlockingRanks(msgspec.Struct, frozen=True):
    """The ranks that block the job."""

    roots: list[Root]
    missed: list[Stuck]
    all_waiting: list[Stuck]
    """Collectives in which all members wait."""


def find_blocking_ranks(tables: Sequence[Table], recordings: Mapping[int, Recording]) -> BlockingRanks:
    """Finds the roots: the ranks that all others wait for, directly or indirectly."""
    missed, all_waiting = stuck_collectives(tables, recordings)
    partners = partners_of(recordings)
    blocked = _BlockedRanks(tables, missed, partners, recordings)
    unfinished = _unfinished(tables, recordings)
    roots: dict[int, Root] = {}

    def add(among: Sequence[Stuck], with_root: bool) -> None:
        for stuck in among:
            for rank in stuck.missing:
                why = blocked.why_root(rank, stuck, with_root)
                if why is not None and rank not in roots:
                    roots[rank] = Root(rank, why, stuck, unfinished[rank])

    add(missed, with_root=False)
    add([each for each in missed if roots.keys() & set(each.missing)], with_root=True)
    found = (
        roots
        # A missing dump may be lost or unreadable: its rank is not reported if other ranks' own dumps show that they are roots.
        or _without_recording(missed, recordings)
        or {
            rank: Root(rank, RootReason.CIRCLE, stuck, unfinished[rank])
            for stuck in reversed(missed)
            for rank in stuck.missing
        }
        or _lagging_devices(unfinished, recordings)
        or _missing_messages(partners, recordings)
    )
    return BlockingRanks(sorted(found.values(), key=lambda root: root.rank), missed, all_waiting)


def _without_recording(missed: Sequence[Stuck], recordings: Mapping[int, Recording]) -> dict[int, Root]:
    """Ranks without a recording in the collectives that are a waiting rank's first pending operation; if there are no such collectives,
    in all of them."""
    first = {rank: pending[0] for rank, recording in recordings.items() if (pending := recording.pending)}
    ahead = [
        stuck
        for stuck in missed
        if stuck.unknown and any(stuck.is_of(first[rank]) for rank in stuck.waiting if rank in first)
    ]
    return {
        rank: Root(rank, RootReason.NO_RECORDING, stuck)
        for stuck in reversed(ahead or missed)
        for rank in stuck.unknown
    }


class _BlockedRanks:
    """Decides whether a rank that has not issued a collective is itself blocked."""

    def __init__(
        self,
        tables: Sequence[Table],
        missed: Sequence[Stuck],
        partners: Mapping[int, list[Partner]],
        recorded: Container[int],
    ) -> None:
        self.recorded = recorded
        self.tables = {table.key: table for table in tables}
        self.waits: dict[int, list[Stuck]] = {}
        for stuck in missed:
            for rank in stuck.waiting:
                self.waits.setdefault(rank, []).append(stuck)
        self.partners = partners
        self.connected = _components(tables)

    def why_root(self, rank: int, stuck: Stuck, with_root: bool = False) -> RootReason | None:
        """Why ``rank``, missing at ``stuck``, is a root; None if it waits for others itself.

        If ranks blocked by the same cause went on issuing, that cause did not stop it. ``with_root``: a root is missing there too,
        so a missing message from a rank without a recording is not enough to excuse it.
        """
        held = [wait for wait in self.waits.get(rank, ()) if set(wait.absent) - {rank}]
        # It waits in a collective that all members have issued, and another rank blocks one of these.
        neighbour_is_blocked = any(
            self._is_blocked(other, rank) for other in self.connected.get(rank, ()) if other != rank
        )
        if self._awaits_message(rank, seen=True, all_lack=not with_root):
            return None
        may_await_message = self._awaits_message(rank)
        if not held and not neighbour_is_blocked and not may_await_message:
            return RootReason.NOT_ISSUED
        if _PRINTING_RANK in stuck.missing:
            return None
        peers = [set(stuck.waiting) & set(wait.waiting) for wait in held]
        if neighbour_is_blocked:
            peers.append(set(stuck.waiting) & set(self.connected[rank]))
        if may_await_message:
            peers.append({each for each in stuck.waiting if self._awaits_message(each)})
        went_on = all(len(each - {rank}) >= _LEAST_PEERS for each in peers)
        records = self.tables[stuck.group].records
        same_last = len({records[each].last for each in stuck.waiting}) == 1
        return RootReason.STOPPED_EARLY if went_on and same_last else None

    def _awaits_message(self, rank: int, seen: bool = False, all_lack: bool = True) -> bool:
        """Whether it waits for a message that others cannot send yet. ``seen``: count only ranks whose recordings show what blocks them;
        ``all_lack``: also count ranks without a recording."""
        for partner in self.partners.get(rank, ()):
            if partner.lacks and (all_lack or partner.rank in self.recorded):
                return True
            waits = self.waits.get(partner.rank, ())
            if any(rank not in wait.absent and (wait.missing or not seen) for wait in waits):
                return True
        return False

    def _is_blocked(self, rank: int, by_other_than: int) -> bool:
        keepers = {absent for wait in self.waits.get(rank, ()) for absent in wait.absent}
        keepers.update(partner.rank for partner in self.partners.get(rank, ()) if partner.lacks)
        return bool(keepers) and by_other_than not in keepers


def _components(tables: Sequence[Table]) -> dict[int, list[int]]:
    """Rank → ranks connected to it, directly or indirectly, by collectives that every member has issued and none has finished."""
    bound: dict[int, list[int]] = {}
    for table in tables:
        if not _pending_on_all(table):
            continue
        lists = {id(bound[rank]): bound[rank] for rank in table.records if rank in bound}
        merged = [rank for each in lists.values() for rank in each]
        merged += [rank for rank in table.records if rank not in bound]
        bound.update(dict.fromkeys(merged, merged))
    return bound


def _unfinished(tables: Sequence[Table], ranks: Iterable[int]) -> dict[int, tuple[Operation, ...]]:
    """Rank → its pending operations that other members have finished."""
    found: dict[int, list[Operation]] = {rank: [] for rank in ranks}
    for table in tables:
        records = table.records
        pending = {number for record in records.values() for number in record.pending}
        done = {
            number
            for number in pending
            if any(
                number not in record.pending and record.last is not None and record.last >= number
                for record in records.values()
            )
        }
        for rank, record in records.items():
            found[rank] += [operation for number, operation in record.pending.items() if number in done]
    return {rank: tuple(sorted(each, key=lambda op: op.order)) for rank, each in found.items()}


def _lagging_devices(
    unfinished: Mapping[int, tuple[Operation, ...]], recordings: Mapping[int, Recording]
) -> dict[int, Root]:
    """Ranks whose devices lag although all have issued everything; {} unless these are fewer than half of the ranks."""
    lagging = [rank for rank, operations in unfinished.items() if operations]
    if not 0 < len(lagging) < len(recordings) / 2:
        return {}
    return {rank: Root(rank, RootReason.UNFINISHED, None, unfinished[rank]) for rank in lagging}


def _missing_messages(
    partners: Mapping[int, list[Partner]], recordings: Mapping[int, Recording]
) -> dict[int, Root]:
    """Ranks whose part of a send or receive is missing and that do not wait for another one. Ranks without a recording are included only
    if there are no others."""
    roots: dict[int, Root] = {}
    for rank, others in partners.items():
        for other in others:
            if other.lacks and not any(each.lacks for each in partners.get(other.rank, ())):
                why = RootReason.NO_MESSAGE if other.rank in recordings else RootReason.NO_RECORDING
                roots.setdefault(other.rank, Root(other.rank, why, None, partner=rank))
    return {rank: root for rank, root in roots.items() if root.why is RootReason.NO_MESSAGE} or roots
