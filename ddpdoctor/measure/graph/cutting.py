"""Cut a profiler window into cycles of matched collectives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array, Ints, Mask
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.measure.window import (
    QUEUED_NS,
    UNKNOWN_STEP,
    Window,
    arrivals,
    step_of_collectives,
)

from .graph import Sync

_NOT_A_MEMBER = np.iinfo(np.int64).min
"""Marks that a rank takes no part in a collective."""
_FEW_STEPS = 2
"""Largest number of marked steps for which the whole window becomes the cycle if no two neighbouring steps are complete."""


class MatchedCollectives(msgspec.Struct, frozen=True, dict=True):
    """Matched collectives as arrays [M, R], in ns on the windows' clock; NaN if the rank takes no part."""

    windows: Sequence[Window]
    rows: Ints
    """Row in the collectives of each window; -1 if the rank takes no part, or if its event is missing."""
    arrival: Array
    end: Array
    ready: Array
    """When the rank's part could have started if the previous collectives had been over."""
    last_arrival: Array
    """[M]"""
    step: Ints
    """[M] step in which most hosts launched it."""

    @cached_property
    def member(self) -> Mask:
        """[M, R] whether the rank takes part."""
        return ~np.isnan(self.arrival)

    @cached_property
    def syncs(self) -> Sequence[Sync]:
        """[M] the synchronisation of each collective; equal ones share one object."""
        _, first, member_set = np.unique(
            np.packbits(self.member, axis=1), axis=0, return_index=True, return_inverse=True
        )
        members = [tuple(np.flatnonzero(self.member[m]).tolist()) for m in first]
        member_set, known = member_set.reshape(-1), dict[Sync, Sync]()
        syncs = np.empty(len(self.rows), object)
        for window, chosen, rows in self._by_first_member():
            comms = window.collectives
            micros = window.micro_batches(comms.issued[rows]).tolist()
            updates = window.updates_before(comms.issued[rows]).tolist()
            for m, row, micro, update in zip(chosen.tolist(), rows.tolist(), micros, updates, strict=True):
                sync = Sync(
                    kind=comms.kind[row],
                    name=comms.operation[row],
                    members=members[member_set[m]],
                    micro=micro,
                    group=comms.group[row],
                    size=max(0, int(comms.group_size[row])),
                    update=update,
                )
                syncs[m] = known.setdefault(sync, sync)
        return list(syncs)

    @cached_property
    def message_bytes(self) -> Array:
        """[M] bytes that a rank contributes; NaN if unknown."""
        sizes = np.full(len(self.rows), np.nan)
        for window, chosen, rows in self._by_first_member():
            sizes[chosen] = window.collectives.bytes[rows]
        return sizes

    @cached_property
    def reduces_gradients(self) -> Mask:
        """[M] whether the collective reduces gradients."""
        return np.array([sync.kind == SyncKind.GRADIENTS for sync in self.syncs], bool)

    def _by_first_member(self) -> Iterator[tuple[Window, Ints, Ints]]:
        """Each window with the collectives of which its rank is the first member, and their rows in the window. Properties that all members
        share are read there."""
        first = (self.rows >= 0).argmax(axis=1)
        for r, window in enumerate(self.windows):
            chosen = np.flatnonzero(first == r)
            if len(chosen):
                yield window, chosen, self.rows[chosen, r]


def matched_collectives(windows: Sequence[Window], rows: Ints) -> MatchedCollectives:
    """Return the arrays of the collectives that were matched in these ``rows`` [M, R]."""
    arrival, end, ready = np.full((3, *rows.shape), np.nan)
    for r, window in enumerate(windows):
        has = rows[:, r] >= 0
        own = rows[has, r]
        arrives, queued = arrivals(window)
        arrival[has, r] = arrives[own]
        # Only a queued collective is known to have been ready before it started.
        ready[has, r] = np.where(queued, window.collectives.ready, arrives)[own]
        end[has, r] = window.collectives.end[own]
    if any(len(window.collectives.computed) for window in windows):
        ready = _ready_by_kernel_count(windows, arrival, ready)
    _fill_missing_events(windows, rows, arrival, end, ready)
    last_arrival = np.nanmax(arrival, axis=1)
    return MatchedCollectives(windows, rows, arrival, end, ready, last_arrival, _steps(windows, rows))


def _fill_missing_events(
    windows: Sequence[Window], rows: Ints, arrival: Array, end: Array, ready: Array
) -> None:
    """Fill the NaN of members whose event is missing, on devices: profilers drop events under load.

    Such a rank left the collective with the others. Without this, what it waited there would look like its own lateness for the next
    collective. That it arrived with the (lower) median member is an assumption. The members of a group are the ranks of at least half of
    its collectives; an event is missing if the rank shares the collectives before and after with other members.
    """
    first = (rows >= 0).argmax(axis=1)
    by_group: dict[str, list[int]] = defaultdict(list)
    for m, r in enumerate(first.tolist()):
        if windows[r].on_device:
            by_group[windows[r].collectives.group[rows[m, r]]].append(m)
    members = [frozenset(np.flatnonzero(row >= 0).tolist()) for row in rows]
    for of_group in by_group.values():
        for full in _member_sets([members[m] for m in of_group]):
            within = [m for m in of_group if members[m] <= full]
            for before, m, after in zip(within, within[1:], within[2:], strict=False):
                if members[m] == full or not members[m] & members[before] & members[after]:
                    continue
                known, lacking, middle = list(members[m]), full - members[m], (len(members[m]) - 1) // 2
                spread_ns = QUEUED_NS + np.ptp(end[m, known])
                for r in lacking & members[before] & members[after]:
                    end[m, r] = np.median(end[m, known])
                    # What the rank started as it left was queued behind this collective.
                    queued = np.flatnonzero(
                        (rows[:, r] >= 0) & (np.abs(arrival[:, r] - end[m, r]) <= spread_ns)
                    )
                    ready[queued, r] = windows[r].collectives.ready[rows[queued, r]]
                    end[m, r] = np.min(arrival[queued, r], initial=end[m, r])
                    arrived = np.maximum(np.sort(arrival[m, known])[middle], end[before, r])
                    arrival[m, r] = np.minimum(arrived, end[m, r])
                    ready[m, r] = np.minimum(np.sort(ready[m, known])[middle], arrival[m, r])


def _member_sets(found: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """The sets that are at least half of all ``found`` subsets of themselves, except subsets of another."""
    counts = Counter(found)
    usual = [
        of
        for of, count in counts.items()
        if 2 * count >= sum(n for other, n in counts.items() if other <= of)
    ]
    return [of for of in usual if not any(of < other for other in usual)]


def _ready_by_kernel_count(windows: Sequence[Window], arrival: Array, ready: Array) -> Array:
    """``ready`` [M, R] corrected in windows without launches. A queued part was ready after as many kernels since the previous collective
    as on a rank whose part was not queued, because all ranks execute the same kernels in the same order."""
    ends = [window.collectives.computed for window in windows]
    known = np.array([len(of_rank) > 0 for of_rank in ends]) & ~np.isnan(arrival)
    done = np.stack([of_rank.searchsorted(ready[:, r], "right") for r, of_rank in enumerate(ends)], axis=1)
    before, last = np.zeros((2, len(ends)), np.int64)
    result = ready.copy()
    for m in np.argsort(np.nanmax(arrival, axis=1), kind="stable").tolist():
        queued = known[m] & (ready[m] < arrival[m])
        shows = known[m] & ~queued
        for r in np.flatnonzero(queued).tolist():
            comparable = shows & (last == last[r])
            if comparable.any():
                kernels = max(int((done[m] - before)[comparable].min()), 0)
                done[m, r] = min(done[m, r], before[r] + kernels)
                if done[m, r] > 0:
                    result[m, r] = min(ready[m, r], ends[r][done[m, r] - 1])
        before[known[m]], last[known[m]] = done[m, known[m]], m + 1
    return result


def _steps(windows: Sequence[Window], rows: Ints) -> Ints:
    """[M] step in which most members launched it, in the numbering of most ranks: profilers may start to count in different steps."""
    by_rank = np.full(rows.shape, _NOT_A_MEMBER)
    for r, window in enumerate(windows):
        has = rows[:, r] >= 0
        by_rank[has, r] = step_of_collectives(window)[rows[has, r]]
    known = (by_rank != _NOT_A_MEMBER) & (by_rank != UNKNOWN_STEP)
    reference = int(known.sum(axis=0).argmax())
    offsets, steps = [0] * len(windows), np.full(len(rows), UNKNOWN_STEP)
    # Ranks that share most collectives with the reference rank come first: others may share collectives only with them.
    for r in np.argsort(-(known & known[:, [reference]]).sum(axis=0), kind="stable").tolist():
        both = known[:, r] & (steps != UNKNOWN_STEP)
        offsets[r] = int(np.median((by_rank[:, r] - steps)[both])) if both.any() else 0
        steps = np.where(known[:, r] & ~both, by_rank[:, r] - offsets[r], steps)
    usual_offset = max(offsets, key=offsets.count)
    by_rank = np.where(known, by_rank - (np.array(offsets, np.int64) - usual_offset), by_rank)
    # The most frequent of the known steps of the members.
    votes = np.where(known.any(axis=1)[:, None], known, by_rank != _NOT_A_MEMBER)
    most = np.iinfo(np.int64).max
    agreed: Ints = np.where(votes, by_rank, most).min(axis=1, initial=most)
    for m in np.flatnonzero(((by_rank != agreed[:, None]) & votes).any(axis=1)):
        of_ranks = by_rank[m, votes[m]].tolist()
        agreed[m] = max(set(of_ranks), key=of_ranks.count)
    return agreed


class Cycle(msgspec.Struct, frozen=True):
    """The collectives of one cycle, and those at whose end it begins."""

    step: int
    after: Ints | None
    """[R] the collective at whose end the rank's cycle begins; None if the cycle begins with the window."""
    body: Sequence[int]
    """Its collectives, ordered by last arrival; on devices, by median last arrival over the cycles with the same collectives."""


class Cut(msgspec.Struct, frozen=True):
    """The cycles of a window, by their sequence of synchronisations."""

    cycles: dict[tuple[Sync, ...], list[Cycle]]
    whole_window: bool = False
    """Whether the window is a single cycle that begins with the earliest event of any rank."""


def _by_sequence(matched: MatchedCollectives, cycles: Sequence[Cycle]) -> dict[tuple[Sync, ...], list[Cycle]]:
    """The cycles by their sequence of synchronisations.

    On devices, collectives of several groups run concurrently, and their order varies randomly between cycles. Cycles with the same
    collectives get the same order, by median last arrival, so that they can be compared. A cycle in which this order is impossible
    keeps its own.
    """
    by_content: dict[frozenset[tuple[Sync, int]], list[tuple[Cycle, dict[tuple[Sync, int], int]]]] = (
        defaultdict(list)
    )
    for cycle in cycles:
        seen: Counter[Sync] = Counter()
        place: dict[tuple[Sync, int], int] = {}
        for m in cycle.body:
            sync = matched.syncs[m]
            seen[sync] += 1
            place[sync, seen[sync]] = m
        by_content[frozenset(place)].append((cycle, place))
    on_device = all(window.on_device for window in matched.windows)
    sequences: dict[tuple[Sync, ...], list[Cycle]] = defaultdict(list)
    for comparable in by_content.values():
        names = list(comparable[0][1])
        bodies = np.array([[place[name] for name in names] for _, place in comparable])
        arrived = matched.last_arrival[bodies]
        usual = np.argsort(np.median(arrived - arrived.min(axis=1, keepdims=True), axis=0), kind="stable")
        for (cycle, _), body in zip(comparable, bodies[:, usual], strict=True):
            arrival = np.where(np.isnan(matched.arrival[body]), -np.inf, matched.arrival[body])
            # The order is possible if no rank left a collective before it arrived at one that precedes it in this order.
            possible = (
                matched.end[body][1:] > np.maximum.accumulate(arrival, axis=0)[:-1]
            ) | ~matched.member[body][1:]
            ordered = body.tolist() if on_device and possible.all() else cycle.body
            sequences[tuple(matched.syncs[m] for m in ordered)].append(
                Cycle(cycle.step, cycle.after, ordered)
            )
    return dict(sequences)


def cut_into_cycles(matched: MatchedCollectives) -> Cut:
    """Cut the window into cycles, each from the end of a step's last collective of all ranks to the end of the next step's."""
    order = np.argsort(matched.last_arrival, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    by_step = order[np.argsort(matched.step[order], kind="stable")]
    numbers, begins = np.unique(matched.step[by_step], return_index=True)
    of_steps = dict(zip(numbers.tolist(), np.split(by_step, begins[1:]), strict=True))
    steps = [step for step in of_steps if step != UNKNOWN_STEP]
    last_collectives = {step: _last_collectives(matched, of_steps[step]) for step in steps}
    cycles = []
    for before, step in pairwise(steps):
        after, last = last_collectives[before], last_collectives[step]
        if after is not None and last is not None and step == before + 1:
            # The collectives that for each of their members come after its collective in ``after``, up to its collective in ``last``.
            low, high = place[after], place[last]
            candidates = order[low.min() : high.max() + 1]
            at = place[candidates][:, None]
            body = candidates[((low < at) & (at <= high) | ~matched.member[candidates]).all(axis=1)].tolist()
            # If a rank's step number is wrong, its last collective of a step may come after that of the next step, with none between.
            if matched.member[body].any(axis=0).all():
                cycles.append(Cycle(step, after, body))
    if cycles:
        return Cut(_by_sequence(matched, cycles))
    if len(steps) > _FEW_STEPS:
        # Steps were marked, but no two neighbours were matched: their lengths are known, but not which rank waited for which.
        return Cut({})
    return _whole_window(matched, [int(m) for m in order], steps)


def _last_collectives(matched: MatchedCollectives, of_step: Ints) -> Ints | None:
    """[R] the collective at which each rank's cycle ends: its last reduction of gradients in the step, else its last collective.

    If all ranks reduce together, this is one collective; with tensor parallelism each group has its own. None if a rank has no
    collective in the step.
    """
    for candidates in (of_step[matched.reduces_gradients[of_step]], of_step):
        member = matched.member[candidates]
        if member.any(axis=0).all():
            last: Ints = candidates[len(candidates) - 1 - member[::-1].argmax(axis=0)]
            return last
    return None


def _whole_window(matched: MatchedCollectives, order: Sequence[int], steps: Sequence[int]) -> Cut:
    """One cycle for a window with few or no marked steps: from the earliest event of any rank to the last collective of all ranks. Work
    that hosts had launched before the first marked step is excluded: the cycle then begins at the last collective of all ranks before
    that step."""
    of_all_ranks = set(np.flatnonzero(matched.member.all(axis=1)).tolist())
    full = [m for m in order if m in of_all_ranks]
    if not full:
        return Cut({})
    body = [m for m in order if matched.last_arrival[m] <= matched.last_arrival[full[-1]]]
    if steps:
        own = next((place for place, m in enumerate(body) if matched.step[m] != UNKNOWN_STEP), len(body))
        earlier = [m for m in body[:own] if m in of_all_ranks]
        if earlier and own < len(body):
            in_step = body[body.index(earlier[-1]) + 1 :]
            cycle = Cycle(steps[0], np.full(len(matched.windows), earlier[-1]), in_step)
            return Cut({tuple(matched.syncs[m] for m in in_step): [cycle]})
    cycle = Cycle(steps[0] if steps else 0, None, body)
    return Cut({tuple(matched.syncs[m] for m in body): [cycle]}, whole_window=True)
