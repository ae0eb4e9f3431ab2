"""Who waits for whom: collectives that some members of a group have pending and others have not issued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from .groups import Table
from .recording import GroupKey, Operation, Recording


class _Tuning(msgspec.Struct, frozen=True):
    slack_ns: int = 5_000_000_000
    """A dump that was written so long before others issued a collective says nothing of it: watchdogs look every second or so,
    and file servers' clocks differ a little."""


_TUNING = _Tuning()


class Stuck(msgspec.Struct, frozen=True):
    """A collective at which some ranks stand."""

    group: GroupKey
    sequence: int
    operation: Operation
    """As the first of those that wait issued it."""
    waiting: tuple[int, ...]
    missing: tuple[int, ...] = ()
    """Members whose recording shows that they have not issued it."""
    unknown: tuple[int, ...] = ()
    """Members without a recording, or with one from before."""

    @property
    def absent(self) -> tuple[int, ...]:
        return self.missing or self.unknown

    @property
    def since_ns(self) -> int | None:
        return self.operation.created_ns


def stuck_collectives(
    tables: Sequence[Table], recordings: Mapping[int, Recording]
) -> tuple[list[Stuck], list[Stuck]]:
    """Collectives that members miss, and those at which all members stand; both with the first one first."""
    missed: list[Stuck] = []
    whole: list[Stuck] = []
    for table in tables:
        here = _of(table, recordings)
        missed += here
        everybody = None if here else _with_all(table)
        whole += [everybody] if everybody else []
    return sorted(missed, key=_when), sorted(whole, key=_when)


def _when(stuck: Stuck) -> tuple[int, int]:
    return (stuck.since_ns or 0, -len(stuck.waiting))


def _of(table: Table, recordings: Mapping[int, Recording]) -> list[Stuck]:
    """The collectives of one group that members miss, one for each place at which such a member stands."""
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
        # What somebody has finished, all have issued.
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
    issued = table.operation(place, table.seats)
    if issued is None or issued.created_ns is None:
        return True
    if (
        recording.written_ns is not None
        and recording.written_ns < issued.created_ns - _TUNING.slack_ns
        and recording.last_ns is not None
        and recording.written_ns >= recording.last_ns
    ):
        return False
    seat = table.seats[recording.rank]
    overwritten = recording.forgotten and (recording.first_ns or 0) > issued.created_ns
    return seat.last is not None or not overwritten


def _with_all(table: Table) -> Stuck | None:
    """The first collective that all members have issued and none has finished."""
    seats = list(table.seats.values())
    if len(seats) < len(table.members) or not seats:
        return None
    shared = set.intersection(*(set(seat.pending) for seat in seats))
    return _stuck(table, min(shared), [], [])[0] if shared else None


def unfinished(table: Table) -> dict[int, list[Operation]]:
    """By rank, what it has pending and other members have finished: its part of it is done, and nothing of it noted that."""
    seats = table.seats
    pending = {number for seat in seats.values() for number in seat.pending}
    done = {
        number
        for number in pending
        if any(number not in seat.pending and (seat.last or -1) >= number for seat in seats.values())
    }
    return {
        rank: [operation for number, operation in seat.pending.items() if number in done]
        for rank, seat in seats.items()
    }


class Partner(msgspec.Struct, frozen=True):
    """A rank with which another has sends or receives pending."""

    rank: int
    lacks: bool
    """It has not issued its part of all of them, as far as its own recording shows."""


def partners_of(recordings: Mapping[int, Recording]) -> dict[int, list[Partner]]:
    """By rank, those it exchanges messages with that are not through."""
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
