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
    whole: list[Stuck] = []
    for table in tables:
        here = _of(table, recordings)
        missed += here
        if not here and (shared := _shared(table)):
            whole += _stuck(table, min(shared), [], [])
    return sorted(missed, key=_when), sorted(whole, key=_when)


def _when(stuck: Stuck) -> tuple[int, int]:
    return (stuck.since_ns or 0, -len(stuck.waiting))


def _of(table: Table, recordings: Mapping[int, Recording]) -> list[Stuck]:
    """The collectives of one group that some members have not issued: for each of these members, the first pending one after its last."""
    seats = table.seats
    pending = sorted({number for seat in seats.values() for number in seat.pending})
    if not pending:
        return []
    highest = {rank: max(seat.pending, default=-1) for rank, seat in seats.items()}
    far = max(highest.values())
    by_place: dict[int, list[int]] = {}
    for rank, seat in seats.items():
        last = -1 if seat.last is None else seat.last
        if last < far and not seat.pending.keys() & {far}:
            place = next((number for number in pending if number > last), None)
            if place is not None:
                by_place.setdefault(place, []).append(rank)
    found = []
    for place, ranks in by_place.items():
        known = [rank for rank in ranks if _would_tell(recordings[rank], table, place)]
        unknown = [*(rank for rank in ranks if rank not in known), *table.unrecorded]
        found += _stuck(table, place, known, unknown)
    if not by_place and table.unrecorded:
        # A collective that one member has finished was issued by all.
        place = next((n for n in pending if all(n in seat.pending for seat in seats.values())), -1)
        found += _stuck(table, place, [], table.unrecorded)
    return found


def _stuck(table: Table, place: int, missing: Sequence[int], unknown: Sequence[int]) -> list[Stuck]:
    waiting = [rank for rank, seat in table.seats.items() if place in seat.pending]
    if not waiting:
        return []
    issued = (table.seats[rank].pending[place] for rank in waiting)
    first = min(issued, key=lambda each: each.created_ns or 0)
    groups = (tuple(sorted(ranks)) for ranks in (waiting, missing, unknown))
    return [Stuck(table.key, place, first, *groups)]


def _would_tell(recording: Recording, table: Table, place: int) -> bool:
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
    seat = table.seats[recording.rank]
    overwritten = recording.forgotten and (recording.first_ns or 0) > issued.created_ns
    return seat.last is not None or not overwritten


def _shared(table: Table) -> set[int]:
    """Sequence numbers of collectives that all members have issued and none has finished."""
    seats = list(table.seats.values())
    if len(seats) < len(table.members) or not seats:
        return set()
    return set.intersection(*(set(seat.pending) for seat in seats))


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
            pair = _global(message)
            if message.pending and pair and recording.rank in pair:
                open_[(recording.rank, *pair)] += 1
    found: dict[int, list[Partner]] = {}
    for (rank, sender, receiver), many in open_.items():
        other = receiver if rank == sender else sender
        lacks = other not in recordings or open_[(other, sender, receiver)] < many
        found.setdefault(rank, []).append(Partner(other, lacks))
    return found


def _global(message: Operation) -> tuple[int, int] | None:
    """Sender and receiver as global ranks."""
    members, pair = message.group.members, message.pair
    if pair is None or members is None:
        return pair
    return (members[pair[0]], members[pair[1]]) if max(pair) < len(members) else None


_LEAST_PEERS = 3
"""Fewest ranks that wait in the same collective and have issued more, all of them equally many, from which a rank that has not is
reported as stopped: two hosts may run ahead of their devices by different amounts."""
_LOGS = 0
"""In most jobs this rank reads results to print them, so it may stop before the others."""


class Why(StrEnum):
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
    why: Why
    stuck: Stuck | None
    """The first collective at which others wait for it."""
    unfinished: tuple[Operation, ...] = ()
    """Its pending operations that others have finished: its device, or the thread that watches it, had stopped."""
    partner: int | None = None
    """The rank that waits for its message."""


class Blame(msgspec.Struct, frozen=True):
    """The ranks that block the job."""

    roots: list[Root]
    missed: list[Stuck]
    whole: list[Stuck]
    """Collectives in which all members wait."""


def blame(tables: Sequence[Table], recordings: Mapping[int, Recording]) -> Blame:
    """Finds the roots: the ranks that all others wait for, directly or indirectly."""
    missed, whole = stuck_collectives(tables, recordings)
    partners = partners_of(recordings)
    excuses = _Excuses(tables, missed, partners, recordings)
    behind = _unfinished(tables, recordings)
    roots: dict[int, Root] = {}

    def add(among: Sequence[Stuck], with_root: bool) -> None:
        for stuck in among:
            for rank in stuck.missing:
                why = excuses.why_root(rank, stuck, with_root)
                if why is not None and rank not in roots:
                    roots[rank] = Root(rank, why, stuck, behind[rank])

    add(missed, with_root=False)
    add([each for each in missed if roots.keys() & set(each.missing)], with_root=True)
    found = (
        roots
        # A missing dump may be lost or unreadable: its rank is not reported if other ranks' own dumps show that they are roots.
        or _without_recording(missed, recordings)
        or {
            rank: Root(rank, Why.CIRCLE, stuck, behind[rank])
            for stuck in reversed(missed)
            for rank in stuck.missing
        }
        or _of_devices(behind, recordings)
        or _of_messages(partners, recordings)
    )
    return Blame(sorted(found.values(), key=lambda root: root.rank), missed, whole)


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
        rank: Root(rank, Why.NO_RECORDING, stuck)
        for stuck in reversed(ahead or missed)
        for rank in stuck.unknown
    }


class _Excuses:
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
        self.beside = _components(tables)

    def why_root(self, rank: int, stuck: Stuck, with_root: bool = False) -> Why | None:
        """Why ``rank``, missing at ``stuck``, is a root; None if it waits for others itself.

        If ranks blocked by the same cause went on issuing, that cause did not stop it. ``with_root``: a root is missing there too,
        so a missing message from a rank without a recording is not enough to excuse it.
        """
        held = [wait for wait in self.waits.get(rank, ()) if set(wait.absent) - {rank}]
        # It waits in a collective that all members have issued, and another rank blocks one of these.
        bound_is_kept = any(
            self._is_kept(other, rank) for other in self.beside.get(rank, ()) if other != rank
        )
        if self._awaits_message(rank, seen=True, all_lack=not with_root):
            return None
        perhaps = self._awaits_message(rank)
        if not held and not bound_is_kept and not perhaps:
            return Why.NOT_ISSUED
        if _LOGS in stuck.missing:
            return None
        peers = [set(stuck.waiting) & set(wait.waiting) for wait in held]
        if bound_is_kept:
            peers.append(set(stuck.waiting) & set(self.beside[rank]))
        if perhaps:
            peers.append({each for each in stuck.waiting if self._awaits_message(each)})
        went_on = all(len(each - {rank}) >= _LEAST_PEERS for each in peers)
        seats = self.tables[stuck.group].seats
        alike = len({seats[each].last for each in stuck.waiting}) == 1
        return Why.STOPPED_EARLY if went_on and alike else None

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

    def _is_kept(self, rank: int, by_other_than: int) -> bool:
        keepers = {absent for wait in self.waits.get(rank, ()) for absent in wait.absent}
        keepers.update(partner.rank for partner in self.partners.get(rank, ()) if partner.lacks)
        return bool(keepers) and by_other_than not in keepers


def _components(tables: Sequence[Table]) -> dict[int, list[int]]:
    """Rank → ranks connected to it, directly or indirectly, by collectives that every member has issued and none has finished."""
    bound: dict[int, list[int]] = {}
    for table in tables:
        if not _shared(table):
            continue
        lists = {id(bound[rank]): bound[rank] for rank in table.seats if rank in bound}
        merged = [rank for each in lists.values() for rank in each]
        merged += [rank for rank in table.seats if rank not in bound]
        bound.update(dict.fromkeys(merged, merged))
    return bound


def _unfinished(tables: Sequence[Table], ranks: Iterable[int]) -> dict[int, tuple[Operation, ...]]:
    """Rank → its pending operations that other members have finished."""
    found: dict[int, list[Operation]] = {rank: [] for rank in ranks}
    for table in tables:
        seats = table.seats
        pending = {number for seat in seats.values() for number in seat.pending}
        done = {
            number
            for number in pending
            if any(number not in seat.pending and (seat.last or -1) >= number for seat in seats.values())
        }
        for rank, seat in seats.items():
            found[rank] += [operation for number, operation in seat.pending.items() if number in done]
    return {rank: tuple(sorted(each, key=lambda op: op.order)) for rank, each in found.items()}


def _of_devices(
    behind: Mapping[int, tuple[Operation, ...]], recordings: Mapping[int, Recording]
) -> dict[int, Root]:
    """Ranks whose devices lag although all have issued everything; {} unless these are fewer than half of the ranks."""
    lagging = [rank for rank, operations in behind.items() if operations]
    if not 0 < len(lagging) < len(recordings) / 2:
        return {}
    return {rank: Root(rank, Why.UNFINISHED, None, behind[rank]) for rank in lagging}


def _of_messages(
    partners: Mapping[int, list[Partner]], recordings: Mapping[int, Recording]
) -> dict[int, Root]:
    """Ranks whose part of a send or receive is missing and that do not wait for another one. Ranks without a recording are included only
    if there are no others."""
    roots: dict[int, Root] = {}
    for rank, others in partners.items():
        for other in others:
            if other.lacks and not any(each.lacks for each in partners.get(other.rank, ())):
                why = Why.NO_MESSAGE if other.rank in recordings else Why.NO_RECORDING
                roots.setdefault(other.rank, Root(other.rank, why, None, partner=rank))
    return {rank: root for rank, root in roots.items() if root.why is Why.NO_MESSAGE} or roots
