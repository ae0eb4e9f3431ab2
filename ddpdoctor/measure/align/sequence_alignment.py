"""Align two ranks' sequences of collectives, and merge the ranks one after another.

A collective has the same process group, operation, size, sequence number and step on every rank. The collectives of a process group have
the same order on each rank. A pair is certain if step and place identify it, or if its ends are nearer to each other than to any
neighbour's. Between two certain pairs, dynamic programming finds the best chain of the rest. A larger distance of ends only lowers the
score; a pair is excluded if one rank arrived after the other had left.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Array, Ints, Mask, scatter_of
from ddpdoctor.measure.window import UNKNOWN_STEP, Window, step_of_collectives

_UNEQUAL = ("alltoall", "sendrecv", "send", "recv", "gather", "scatter", "unknown")
"""Operations to which ranks may contribute different amounts: their sizes do not identify a collective."""
_ROOTED = ("broadcast", "reduce", "gather", "scatter", "send", "recv", "unknown")
"""Operations that a rank may leave before another arrives: a rank that only sends need not wait for the receivers."""
_COLUMNS = ("label", "kind", "step", "start", "end", "left", "synchronizes")


class CollectiveSequence(msgspec.Struct, frozen=True):
    """Collectives of one process group in order, [M]; times int64 ns."""

    label: Ints
    """Equal on all ranks: a code for operation and size, and the sequence number if it has one."""
    kind: Ints
    """The same without the sequence number."""
    step: Ints
    """Step in which the host launched it. -1 if unknown, or if a sequence number identifies it, because windows may count their steps from
    their own beginnings."""
    start: Ints
    """Latest start among the members known so far."""
    end: Ints
    left: Ints
    """Earliest end among the members known so far."""
    synchronizes: Mask
    """Whether no rank leaves it before all have arrived, and no sequence number identifies it."""
    one_order: bool = False
    """Whether the order is the same on all ranks: the group is known, or the host issues the collectives one by one."""
    on_device: bool = True
    """If false, an end is delayed until a thread gets a CPU."""

    def __len__(self) -> int:
        return len(self.label)

    def select(self, rows: Ints) -> CollectiveSequence:
        """These rows only."""
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return replace(self, **columns)

    def joined(self, more: CollectiveSequence) -> CollectiveSequence:
        """The collectives of ``self`` followed by those of ``more``."""
        columns: dict[str, Any] = {
            name: np.concatenate((getattr(self, name), getattr(more, name))) for name in _COLUMNS
        }
        return replace(self, **columns)

    def by_clock(self, correction_ns: Ints) -> CollectiveSequence:
        """The collectives on another clock; ``correction_ns`` [M] is added to the times of each."""
        moved = {name: getattr(self, name) + correction_ns for name in ("start", "end", "left")}
        return replace(self, **moved)


def steps_differ(a: Ints, b: Ints) -> Mask:
    """Whether both steps are known and different."""
    different: Mask = (a >= 0) & (b >= 0) & (a != b)
    return different


def can_be_same(reference: CollectiveSequence, other: CollectiveSequence, row: Ints, error_ns: float) -> Mask:
    """[M] whether each of ``other`` can be the one in this ``row`` of ``reference``: neither rank starts after the other has left."""
    after = np.maximum(reference.start[row] - other.left, other.start - reference.left[row])
    possible: Mask = (row >= 0) & ((after <= error_ns) | ~other.synchronizes)
    return possible


Groups = dict[Hashable, tuple[Ints, CollectiveSequence]]
"""Process group → rows in the window's collectives, and the collectives in their order."""


def group_keys(window: Window) -> list[Hashable]:
    """Process group of each collective, with its ranks if the file lists them, because disjoint groups have the same name in some
    versions. Keys are text, whose hash is cached: a group may have thousands of ranks."""
    known: dict[str, Hashable] = {}
    for group in window.trace.meta.process_groups:
        if group.get("ranks"):
            known.setdefault(str(group.get("pg_name")), f"{group.get('pg_name')} {group['ranks']}")
    return [known.get(name, name) for name in window.collectives.group]


def sequences_of(windows: Sequence[Window]) -> list[Groups]:
    """For each window its collectives by process group, without those between two ranks."""
    keys = [group_keys(window) for window in windows]
    names = {key for of_window in keys for key in set(of_window)}
    if "" in names and len(names) == 2:
        # Only one group is named: collectives without a name get that name.
        keys = [[max(names, key=str)] * len(of_window) for of_window in keys]
    # Bytes of each collective, -1 if unknown or different on each rank; and all sizes of a group's operation.
    sizes = [
        np.where(np.isin(comms.operation, _UNEQUAL), -1.0, np.nan_to_num(comms.bytes, nan=-1.0)).tolist()
        for comms in (window.collectives for window in windows)
    ]
    seen: dict[Hashable, set[float]] = defaultdict(set)
    for window, of_window, size in zip(windows, keys, sizes, strict=True):
        for key, op, of in set(zip(of_window, window.collectives.operation, size, strict=True)):
            seen[key, op].add(of)
    # If all known sizes are equal, unknown sizes get the same value.
    only = {what: max(of) for what, of in seen.items() if len(of - {-1.0}) == 1}
    codes: dict[Hashable, int] = {}
    found = []
    for window, of_window, size in zip(windows, keys, sizes, strict=True):
        comms = window.collectives
        kinds = [
            codes.setdefault((op, only.get((key, op)) if of < 0 else of), len(codes))
            for key, op, of in zip(of_window, comms.operation, size, strict=True)
        ]
        labels = [
            codes.setdefault((kind, number), len(codes)) if number >= 0 else kind
            for kind, number in zip(kinds, comms.sequence.tolist(), strict=True)
        ]
        found.append(_by_group(window, of_window, np.array(labels, np.int64), np.array(kinds, np.int64)))
    return found


def _by_group(window: Window, keys: Sequence[Hashable], label: Ints, kind: Ints) -> Groups:
    comms = window.collectives
    step = step_of_collectives(window) if window.steps else np.full(len(comms), UNKNOWN_STEP)
    synchronizes = ~np.isin(np.array(comms.operation, dtype=str), _ROOTED) & (label == kind)
    codes: dict[Hashable, int] = {}
    code = np.array([codes.setdefault(key, len(codes)) for key in keys], np.int64)
    groups: Groups = {}
    for key, number in codes.items():
        rows = np.flatnonzero((code == number) & ~comms.point_to_point)
        rows = rows[np.argsort(comms.start[rows], kind="stable")]
        if len(rows):
            groups[key] = (
                rows,
                CollectiveSequence(
                    label[rows],
                    kind[rows],
                    np.where(label == kind, step, UNKNOWN_STEP)[rows],
                    comms.start[rows],
                    comms.end[rows],
                    comms.end[rows],
                    synchronizes[rows],
                    one_order=key != "" or not window.on_device,
                    on_device=window.on_device,
                ),
            )
    return groups


class ChainTuning(msgspec.Struct, frozen=True):
    """Scores of pairs that are not certain."""

    of_length: float = 0.5
    """Share of a collective's length: twice the spread that sends and receives show."""
    in_order: float = 0.05
    """Score of a pair by order and step alone, if ends are delayed until a thread gets a CPU."""
    block: int = 256
    """Maximum number of collectives that are compared at once if no pair between them is certain."""
    crossing: int = 4
    """Places by which the order of two streams' collectives may differ between ranks."""


CHAINS = ChainTuning()

Stretch = tuple[Ints, Ints]
"""Rows of one rank and of another that may be the same collectives."""


class EndTolerance(msgspec.Struct, frozen=True):
    """Errors of clocks and ends."""

    clock_ns: float
    """Largest error between two clocks."""
    ends_ns: float
    """Largest difference between ends of one collective of any length."""

    def credible_ns(self, a: CollectiveSequence, b: CollectiveSequence) -> Array:
        """Largest plausible difference between the ends of ``a`` and ``b``, row by row."""
        length = np.minimum(a.end - a.start, b.end - b.start)
        allowed: Array = np.maximum(self.ends_ns, CHAINS.of_length * length)
        return allowed


def fill_between(
    reference: CollectiveSequence, other: CollectiveSequence, row: Ints, tolerance: EndTolerance
) -> Ints:
    """``row`` [M] completed by pairs between those that it contains."""
    row = _fill_all(reference, other, row, tolerance, 0)
    return row if reference.one_order else _fill_all(reference, other, row, tolerance, CHAINS.crossing)


def _fill_all(
    reference: CollectiveSequence,
    other: CollectiveSequence,
    row: Ints,
    tolerance: EndTolerance,
    crossing: int,
) -> Ints:
    row = row.copy()
    taken = np.zeros(len(reference), bool)
    taken[row[row >= 0]] = True
    for reference_rows, other_rows in list(_between(taken, row, crossing)):
        for left, other_left in _blocks(
            reference, other, (reference_rows[~taken[reference_rows]], other_rows)
        ):
            _fill_stretch(reference, other, row, (left, other_left), tolerance)
            taken[row[other_left[row[other_left] >= 0]]] = True
    return row


def _fill_stretch(
    reference: CollectiveSequence,
    other: CollectiveSequence,
    row: Ints,
    stretch: Stretch,
    tolerance: EndTolerance,
) -> None:
    """Write the pairs of a stretch into ``row``."""
    reference_rows, other_rows = stretch
    a, b = reference.select(reference_rows), other.select(other_rows)
    scores = _pair_scores(a, b, tolerance).reshape(len(a), len(b))
    before, behind = int(other_rows[0]) - 1, int(other_rows[-1]) + 1
    # If the stretch is enclosed by pairs and has the same length on both ranks, nothing is missing and the order is certain.
    enclosed = before >= 0 and behind < len(row) and len(a) == len(b) == behind - before - 1
    enclosed = enclosed and np.array_equal(reference_rows, np.arange(row[before] + 1, row[behind]))
    if enclosed and scores.diagonal().all():
        row[other_rows] = reference_rows
        return
    at, there = _best_chain(scores)
    row[other_rows[there]] = reference_rows[at]


def _between(taken: Mask, row: Ints, crossing: int) -> Iterator[Stretch]:
    """The stretches in which both ranks have unpaired collectives."""
    reference_rows, other_rows = np.flatnonzero(~taken), np.flatnonzero(row < 0)
    if not len(reference_rows) or not len(other_rows):
        return
    # Paired rows of the reference before and after each unpaired row of the other rank.
    low = np.maximum.accumulate(row)[other_rows]
    high = np.minimum.accumulate(np.where(row >= 0, row, len(taken))[::-1])[::-1][other_rows]
    low, high = np.minimum(low, high) - crossing, np.maximum(low, high) + crossing
    first, last = np.searchsorted(reference_rows, low, side="right"), np.searchsorted(reference_rows, high)
    edges = np.flatnonzero((np.diff(first) != 0) | (np.diff(last) != 0)) + 1
    for begin, end in pairwise([0, *edges.tolist(), len(other_rows)]):
        if last[begin] > first[begin]:
            yield reference_rows[first[begin] : last[begin]], other_rows[begin:end]


def _blocks(reference: CollectiveSequence, other: CollectiveSequence, stretch: Stretch) -> Iterator[Stretch]:
    """The stretch, divided at the same times on both ranks if it is long."""
    reference_rows, other_rows = stretch
    if len(other_rows) <= CHAINS.block:
        yield stretch
        return
    cuts = np.arange(CHAINS.block, len(other_rows), CHAINS.block)
    at = np.maximum.accumulate(other.end[other_rows])[cuts - 1]
    our_cuts = np.searchsorted(np.maximum.accumulate(reference.end[reference_rows]), at, side="right")
    yield from zip(np.split(reference_rows, our_cuts), np.split(other_rows, cuts), strict=True)


def _pair_scores(a: CollectiveSequence, b: CollectiveSequence, tolerance: EndTolerance) -> Array:
    """[N * M] score from 0 to 1, higher for nearer ends; 0 for different labels or steps, or if one rank arrives after the other has
    left."""
    reference_rows, other_rows = np.repeat(np.arange(len(a)), len(b)), np.tile(np.arange(len(b)), len(a))
    a, b = a.select(reference_rows), b.select(other_rows)
    possible = (
        (a.label == b.label)
        & ~steps_differ(a.step, b.step)
        & can_be_same(a, b, np.arange(len(a)), tolerance.clock_ns)
    )
    nearness = 1.0 - (np.abs(a.end - b.end) / tolerance.credible_ns(a, b)) ** 2
    by_order = (a.step == b.step) & (b.step >= 0) & (not b.on_device)
    least = np.where(by_order, CHAINS.in_order, 0.0)
    return np.where(possible, np.maximum(nearness, least), 0.0)


def _best_chain(scores: Array) -> Stretch:
    """(Rows, columns) of the pairs, increasing in both, with the largest sum of ``scores`` [N, M]."""
    rows, columns = scores.shape
    best = np.zeros((rows + 1, columns + 1))
    for i in range(rows):
        taken = best[i, :-1] + scores[i]
        best[i + 1, 1:] = np.maximum.accumulate(np.maximum(best[i, 1:], taken))
    chain: list[tuple[int, int]] = []
    i, j = rows, columns
    while i and j:
        if best[i, j] == best[i - 1, j]:
            i -= 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            chain.append((i, j))
    found = np.array(chain[::-1], np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


class SureTuning(msgspec.Struct, frozen=True):
    """Thresholds of certain pairs."""

    near: float = 0.25
    """Largest distance of the ends as a share of the distance to the nearest neighbour of the same kind. In unrelated sequences half of
    the ends are that close, but no two in a row."""
    clear: float = 12.0
    """Multiple of the ends' scatter below which neighbours cannot be distinguished by time."""
    scatters: float = 6.0
    """Largest distance of two ends as a multiple of their scatter: excludes less than one in a million normal errors."""
    tightest_ns: float = 150_000.0
    """Minimum tolerance: more than the 90 microseconds by which ends scatter within a host, and similar to the error of a device's
    clock."""


SURE = SureTuning()


def align_sequences(
    reference: CollectiveSequence, other: CollectiveSequence, scatter_ns: float, clock_ns: float = 0.0
) -> Ints:
    """[M] row in ``reference`` of each collective of ``other``, on one clock; -1 if it is missing there.

    ``scatter_ns``: scatter of ends; ``clock_ns``: error of the clock, 0 if both ranks have the same clock.
    """
    if not len(reference) or not len(other):
        return np.full(len(other), -1, np.int64)
    clock_ns = max(SURE.tightest_ns, clock_ns)
    near = _nearest(reference, other, clock_ns)
    # Profilers may begin to count steps at different steps.
    known = (near >= 0) & (reference.step[near] >= 0) & (other.step >= 0)
    ahead = int(np.median((reference.step[near] - other.step)[known])) if known.any() else 0
    other = replace(other, step=np.where(other.step >= 0, other.step + ahead, other.step))
    by_step = in_equal_steps(reference, other)
    by_step[~can_be_same(reference, other, by_step, clock_ns)] = -1
    apart_ns = np.abs(reference.end[by_step] - other.end)[by_step >= 0]
    scatter_ns = max(scatter_ns, float(scatter_of(apart_ns)) if len(apart_ns) else 0.0)
    tolerance = EndTolerance(clock_ns, max(SURE.tightest_ns, SURE.scatters * scatter_ns))
    if other.on_device:
        near_ends = np.abs(reference.end[by_step] - other.end) <= tolerance.credible_ns(
            reference.select(by_step), other
        )
        by_step = np.where((by_step >= 0) & near_ends, by_step, -1)
    sure = _certain(reference, other, near, SURE.clear * scatter_ns)
    sure[(sure >= 0) & steps_differ(reference.step[sure], other.step)] = -1
    row = np.where(sure >= 0, sure, by_step)
    row[(sure >= 0) & (by_step >= 0) & (sure != by_step)] = -1
    asked = np.bincount(row[row >= 0], minlength=len(reference))
    row[asked[row] > 1] = -1
    if reference.one_order:
        row = _increasing(row)
    return fill_between(reference, other, row, tolerance)


def certain_pairs(reference: CollectiveSequence, other: CollectiveSequence) -> Ints:
    """[M] like :func:`align_sequences`, but only pairs that are certain by time alone."""
    return _certain(reference, other, _nearest(reference, other, np.inf), 0.0)


def _nearest(reference: CollectiveSequence, other: CollectiveSequence, error_ns: float) -> Ints:
    """[M] row with the same label and the nearest end, if each is the other's nearest; else -1."""
    there = _closest(reference.label, reference.end, other.label, other.end)
    back = _closest(other.label, other.end, reference.label, reference.end)
    there = np.where((there >= 0) & (back[there] == np.arange(len(other))), there, -1)
    there[~can_be_same(reference, other, there, error_ns)] = -1
    return there


def _certain(reference: CollectiveSequence, other: CollectiveSequence, near: Ints, clear_ns: float) -> Ints:
    """[M] row of the pairs in ``near`` that are much nearer to each other than to any neighbour; else -1."""
    gap = np.minimum(spacing(reference.label, reference.end)[near], spacing(other.label, other.end))
    sure = (near >= 0) & (np.abs(reference.end[near] - other.end) <= SURE.near * gap) & (gap >= clear_ns)
    return np.where(sure, near, -1)


def spacing(label: Ints, end: Ints) -> Array:
    """[M] ns to the nearest end with the same label on the same rank; infinite if there is no other."""
    order = np.lexsort((end, label))
    step = np.diff(end[order]).astype(float)
    step[np.diff(label[order]) != 0] = np.inf
    gaps = np.concatenate(([np.inf], step, [np.inf]))
    found = np.empty(len(label))
    found[order] = np.minimum(gaps[:-1], gaps[1:])
    return found


def _closest(label: Ints, end: Ints, at_label: Ints, at: Ints) -> Ints:
    """For each time in ``at``, the row with the same label and the nearest end; -1 without any."""
    count = len(label)
    labels, times = np.concatenate((label, at_label)), np.concatenate((end, at))
    # The sort is stable, so that at equal times the rows stand before the times in ``at``.
    order = np.lexsort((times, labels))
    places = np.where(order < count, np.arange(len(order)), -1)
    before = np.maximum.accumulate(places)
    places = np.where(order < count, np.arange(len(order)), len(order))
    after = np.minimum.accumulate(places[::-1])[::-1]
    best, distance = np.full(len(order), -1, np.int64), np.full(len(order), np.inf)
    for side in (before, after):
        valid = (side >= 0) & (side < len(order))
        rows = order[np.where(valid, side, 0)]
        valid &= labels[rows] == labels[order]
        away = np.where(valid, np.abs(times[rows] - times[order]).astype(float), np.inf)
        best, distance = np.where(away < distance, rows, best), np.minimum(away, distance)
    is_query = order >= count
    row = np.empty(len(at), np.int64)
    row[order[is_query] - count] = best[is_query]
    return row


def in_equal_steps(reference: CollectiveSequence, other: CollectiveSequence) -> Ints:
    """[M] like :func:`align_sequences`, but without clocks: by place among the collectives with the same label in a step, if both ranks
    have the same number of these."""
    row = np.full(len(other), -1, np.int64)
    reference_rows, other_rows = np.flatnonzero(reference.step >= 0), np.flatnonzero(other.step >= 0)
    if not len(reference_rows) or not len(other_rows):
        return row
    first = min(reference.step[reference_rows].min(), other.step[other_rows].min())
    steps = int(max(reference.step[reference_rows].max(), other.step[other_rows].max()) - first) + 1
    a = reference.label[reference_rows] * steps + reference.step[reference_rows] - first
    b = other.label[other_rows] * steps + other.step[other_rows] - first
    codes, a_count = np.unique(a, return_counts=True)
    b_codes, b_count = np.unique(b, return_counts=True)
    common, at, b_at = np.intersect1d(codes, b_codes, assume_unique=True, return_indices=True)
    alike = common[a_count[at] == b_count[b_at]]
    reference_rows, other_rows = reference_rows[np.isin(a, alike)], other_rows[np.isin(b, alike)]
    a = reference.label[reference_rows] * steps + reference.step[reference_rows] - first
    b = other.label[other_rows] * steps + other.step[other_rows] - first
    row[other_rows[np.argsort(b, kind="stable")]] = reference_rows[np.argsort(a, kind="stable")]
    return row


def _increasing(row: Ints) -> Ints:
    """The longest increasing subsequence of ``row``; the rest is -1."""
    at = np.flatnonzero(row >= 0)
    if (np.diff(row[at]) > 0).all():
        return row
    tails: list[int] = []
    ends: list[int] = []
    before = np.full(len(row), -1, np.int64)
    for j in at.tolist():
        place = bisect_left(tails, int(row[j]))
        before[j] = ends[place - 1] if place else -1
        tails[place : place + 1], ends[place : place + 1] = [int(row[j])], [j]
    kept = np.full(len(row), -1, np.int64)
    j = ends[-1]
    while j >= 0:
        kept[j] = row[j]
        j = int(before[j])
    return kept


def merge_ranks(
    members: Mapping[int, tuple[Ints, CollectiveSequence]], world: int, scatter_ns: float, clock_ns: float
) -> Ints:
    """[L, world] row of each collective in the windows of its members, in order; -1 if it is missing.

    ``members``: position → (rows in the window's collectives, the collectives on the common clock). Ranks are aligned one after another
    with the merged sequence; collectives that it lacks are inserted in order.
    """
    reference: CollectiveSequence | None = None
    table = np.empty((0, world), np.int64)
    for position, (rows, own) in members.items():
        if reference is None:
            reference, table = own, np.full((len(rows), world), -1, np.int64)
            table[:, position] = rows
            continue
        row = align_sequences(reference, own, scatter_ns, clock_ns)
        has = row >= 0
        table[row[has], position] = rows[has]
        at, step = row[has], reference.step.copy()
        start, left = reference.start.copy(), reference.left.copy()
        start[at], left[at] = np.maximum(start[at], own.start[has]), np.minimum(left[at], own.left[has])
        step[at] = np.where(step[at] < 0, own.step[has], step[at])
        reference = replace(reference, start=start, left=left, step=step)
        new = np.flatnonzero(~has)
        if not len(new):
            continue
        added = np.full((len(new), world), -1, np.int64)
        added[:, position] = rows[new]
        # After the last of this rank's collectives that the reference has, in this rank's order.
        behind = np.maximum.accumulate(row)[new]
        place = np.concatenate((np.arange(len(reference)), behind))
        order = np.lexsort((np.concatenate((np.full(len(reference), -1), new)), place))
        reference = reference.joined(own.select(new)).select(order)
        table = np.concatenate((table, added))[order]
    return table
