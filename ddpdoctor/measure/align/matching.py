"""Find the same collective on every rank: by process group and sequence number if the trace has them, else by the order of the group's
collectives on each rank. Count the collectives that lack members, with the reasons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import Array, Ints, Mask
from ddpdoctor.measure.window import Window

from .sequence_alignment import (
    CollectiveSequence,
    Groups,
    align_sequences,
    merge_ranks,
    sequences_of,
    spacing,
)
from .trace_clocks import BY_STREAM, align_trace_clocks, can_be_one_group, is_by_stream, several_clocks

_FEWEST_LACKING = 2
"""Minimum number of consecutive collectives that a stopped rank lacks at the end of a window: the event of a single one may be missing."""


class MatchCoverage(msgspec.Struct, frozen=True):
    """Number of collectives of several ranks that were found on all of them, and of others by reason.

    A collective that lacks several members for different reasons counts once, by the first reason in the order of the fields.
    """

    complete: int = 0
    rank_stopped: int = 0
    """A member's window continues, without any more collectives of the group."""
    event_missing: int = 0
    """A member has the collectives before and after it: its event is missing."""
    outside_window: int = 0
    """A member's window does not cover it."""

    @property
    def incomplete(self) -> int:
        """Collectives that lack members."""
        return self.rank_stopped + self.event_missing + self.outside_window


class Spread(msgspec.Struct, frozen=True):
    """Members and ends of each collective of a group, [L]."""

    members: Ints
    """Number of ranks on which it is found."""
    reached: Ints
    """Number of ranks of the group whose windows cover it."""
    first: Ints
    """ns of the first member's end."""
    last: Ints
    """ns of the last member's end."""
    overlap: Mask
    """Whether there was a time at which all members were in it."""

    @property
    def end_spread_ns(self) -> Array:
        """[L] ns from the first to the last end."""
        return (self.last - self.first).astype(float)


def spread_of(windows: Sequence[Window], table: Ints) -> Spread:
    """The spread of the collectives in ``table`` [L, R], see :func:`.sequence_alignment.merge_ranks`."""
    first = np.full(len(table), np.iinfo(np.int64).max)
    last, begun = np.full((2, len(table)), np.iinfo(np.int64).min)
    members = np.flatnonzero((table >= 0).any(axis=0)).tolist()
    for position in members:
        has = table[:, position] >= 0
        end = windows[position].collectives.end[table[has, position]]
        first[has], last[has] = np.minimum(first[has], end), np.maximum(last[has], end)
        begun[has] = np.maximum(begun[has], windows[position].collectives.start[table[has, position]])
    reached = np.zeros(len(table), np.int64)
    for position in members:
        begin, end = windows[position].span
        reached += ((first <= end) & (last >= begin)).astype(np.int64)
    return Spread((table >= 0).sum(axis=1), reached, first, last, overlap=begun <= first)


def coverage(windows: Sequence[Window], shared: Sequence[tuple[Ints, Spread]]) -> MatchCoverage:
    """The coverage of the collectives of ``shared`` groups, which have several recorded ranks."""
    complete, outside_window, event_missing, rank_stopped = range(4)
    counts = np.zeros(4, np.int64)
    for table, spread in shared:
        reason = np.full(len(table), complete)
        for position in np.flatnonzero((table >= 0).any(axis=0)).tolist():
            lacks = table[:, position] < 0
            begin, end = windows[position].span
            outside = (spread.last < begin) | (spread.first > end)
            gone = ~outside & (np.arange(len(table)) > np.flatnonzero(~lacks)[-1])
            why = np.where(gone & (gone.sum() >= _FEWEST_LACKING), rank_stopped, event_missing)
            reason[lacks] = np.maximum(reason, np.where(outside, outside_window, why))[lacks]
        counts += np.bincount(reason, minlength=4)
    return MatchCoverage(*counts[[complete, rank_stopped, event_missing, outside_window]].tolist())


class Tuning(msgspec.Struct, frozen=True):
    """Thresholds of a plausible match."""

    least_matched: float = 0.5
    """Minimum share of the collectives that are matched: windows that overlap by less are probably from different jobs."""
    chance_share: float = 0.2
    """Largest plausible distance of ends as a share of the distance to the next collective of the same kind. Ends of unrelated collectives
    are a quarter of it apart in the median, ends of one collective less than its length."""
    most_missing: float = 0.2
    """Largest plausible share of collectives of which an event is missing, of groups by stream: profilers lose 1 % of the events, so one of
    16 ranks' in 15 % of the collectives."""
    same_end_ns: int = 150_000
    """Ends within this time are the same, even if collectives follow each other more closely: more than the 90 microseconds that are
    measured within a host."""


TUNING = Tuning()


class Matched(msgspec.Struct, frozen=True):
    """Collectives matched across windows."""

    rows: NDArray[np.int64]
    """[M, R] row in each window's collectives, -1 if the rank has no part in it."""
    unmatched: int = 0
    refused: str | None = None
    """Why the match is implausible; None if it is plausible."""
    error_ns: float | None = None
    """Error bound of the clocks' alignment; None if nothing was aligned."""
    coverage: MatchCoverage = msgspec.field(default_factory=MatchCoverage)


def align_and_match(windows: Sequence[Window]) -> tuple[list[Window], Matched]:
    """(windows on one clock, their matched collectives). Ranks without collectives keep their clock."""
    by_stream = _with_groups_by_stream(windows)
    aligned, matched = _align_and_match(by_stream)
    if by_stream is not windows and (
        matched.refused or matched.coverage.event_missing > TUNING.most_missing * matched.coverage.complete
    ):
        # The streams are in another order on some rank.
        return _align_and_match(windows)
    return aligned, matched


def _align_and_match(windows: Sequence[Window]) -> tuple[list[Window], Matched]:
    active = [position for position, window in enumerate(windows) if len(window.collectives)]
    if len(active) < 2:
        unmatched = sum(len(window.collectives) for window in windows)
        return list(windows), Matched(np.empty((0, len(windows)), np.int64), unmatched)
    taking_part = [windows[position] for position in active]
    moved, groups, error_ns = align_trace_clocks(taking_part, sequences_of(taking_part))
    by_position = dict(zip(active, moved, strict=True))
    aligned = [by_position.get(position, window) for position, window in enumerate(windows)]
    of_ranks = dict(zip(active, groups, strict=True))
    clock_ns = error_ns if several_clocks(taking_part) else 0.0
    # By process group; includes groups with one recorded rank.
    by_group: dict[Hashable, dict[int, tuple[Ints, CollectiveSequence]]] = defaultdict(dict)
    for position, of_rank in of_ranks.items():
        for key, of_group in of_rank.items():
            by_group[key][position] = of_group
    tables = [
        merge_ranks(members, len(windows), error_ns, clock_ns)
        for key, of_key in by_group.items()
        for members in (_disjoint_groups(of_key, error_ns, clock_ns) if is_by_stream(key) else [of_key])
    ]
    shared = [(table, spread_of(aligned, table)) for table in tables if (table >= 0).any(axis=0).sum() > 1]
    lines = np.concatenate([np.empty((0, len(windows)), np.int64), *tables])
    members = (lines >= 0).sum(axis=1)
    rows = lines[members > 1]
    matched = Matched(
        rows=rows,
        unmatched=sum(len(window.collectives) for window in windows) - int(members[members > 1].sum()),
        refused=_why_implausible(aligned, of_ranks, shared),
        error_ns=error_ns,
        coverage=coverage(aligned, shared),
    )
    return aligned, matched


def _with_groups_by_stream(windows: Sequence[Window]) -> Sequence[Window]:
    """The windows, with the place of its stream among the rank's streams as the name of each collective's group, if no trace names groups.

    Each process group has its own stream, which all its ranks create in the same order. Unchanged if the ranks have different numbers of
    streams, or only one.
    """
    active = [window for window in windows if len(window.collectives)]
    streams = [np.unique(window.collectives.stream, return_inverse=True) for window in active]
    counts = {len(numbers) for numbers, _ in streams}
    if len(counts) != 1 or max(counts) < 2 or any(any(window.collectives.group) for window in active):
        return windows
    named = {
        id(window): replace(window.collectives, group=[f"{BY_STREAM}{n}" for n in place.tolist()])
        for window, (_, place) in zip(active, streams, strict=True)
    }
    return [replace(window, collectives=named.get(id(window), window.collectives)) for window in windows]


Members = Mapping[int, tuple[Ints, CollectiveSequence]]
"""Position → rows in the window's collectives, and the collectives on the common clock."""


def _disjoint_groups(members: Members, scatter_ns: float, clock_ns: float) -> list[Members]:
    """The members of a stream, divided into process groups, for example one per host; undivided if a rank would be alone in its group."""
    groups: list[dict[int, tuple[Ints, CollectiveSequence]]] = []
    for position, (rows, own) in members.items():
        for group in groups:
            reference = next(iter(group.values()))[1]
            if can_be_one_group(reference, own, align_sequences(reference, own, scatter_ns, clock_ns)):
                group[position] = rows, own
                break
        else:
            groups.append({position: (rows, own)})
    return list(groups) if all(len(group) > 1 for group in groups) else [members]


def _why_implausible(
    windows: Sequence[Window], groups: Mapping[int, Groups], shared: Sequence[tuple[Ints, Spread]]
) -> str | None:
    """The reason if a match is implausible: too few collectives are on several ranks, or ends are as far apart as by chance. Else None.

    Ends are not tested for collectives with equal sequence numbers in which all members were at the same time, because processes that
    share a GPU leave them at different times.
    """
    several = sum(int((spread.members > 1).sum()) for _, spread in shared)
    possible = sum(int((spread.reached > 1).sum()) for _, spread in shared)
    if shared and several <= TUNING.least_matched * possible:
        return (
            f"only {several} of {possible} collectives are found on several ranks: the windows do not overlap, events are "
            "missing from the traces, or they come from different jobs"
        )
    distances = _distances(windows, groups)
    apart, of_distance = [np.empty(0)], [np.empty(0)]
    for table, spread in shared:
        chosen = spread.members > 1
        nearest = np.min(
            [np.where(table[chosen, p] >= 0, of[table[chosen, p]], np.inf) for p, of in distances.items()],
            axis=0,
        )
        numbered = np.ones(len(table), bool)
        for position, window in enumerate(windows):
            has = table[:, position] >= 0
            numbered[has] &= window.collectives.sequence[table[has, position]] >= 0
        proven = numbered[chosen] & spread.overlap[chosen]
        apart.append(spread.end_spread_ns[chosen])
        of_distance.append(np.where(proven, 0.0, spread.end_spread_ns[chosen] / nearest))
    apart_ns, shares = np.concatenate(apart), np.concatenate(of_distance)
    if len(shares) and np.median(apart_ns) > TUNING.same_end_ns and np.median(shares) > TUNING.chance_share:
        or_shared = ", or the ranks share a GPU" if any(window.on_device for window in windows) else ""
        return (
            f"the ends of the same collectives are {np.median(apart_ns) / 1e6:.1f} ms apart (median), as far as those of "
            f"unrelated collectives: they are not the same{or_shared}"
        )
    return None


def _distances(windows: Sequence[Window], groups: Mapping[int, Groups]) -> dict[int, Array]:
    """By position, [M] ns from the end of each collective to the nearest of its kind.

    At least the median step on CPUs, where steps identify the collective, and ends are delayed until Gloo's threads get a CPU.
    """
    found = {}
    for position, of_rank in groups.items():
        window = windows[position]
        distance = np.full(len(window.collectives), np.inf)
        for rows, of_group in of_rank.values():
            distance[rows] = spacing(of_group.kind, of_group.end)
        if window.steps and not window.on_device:
            lengths = [end - start for _, start, end in window.steps]
            distance = np.maximum(distance, np.median(lengths))
        found[position] = distance
    return found
