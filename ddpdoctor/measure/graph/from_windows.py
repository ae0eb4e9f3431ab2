"""Profiler windows of all ranks → the dependency graph of the window.

On a device the chain of communication kernels is followed: a rank's segment runs from the end of its previous
collective to the start of its own part in the next. What its device (or, for a job on CPUs, its training
thread) did in that time is the work of the segment. A bucket that is reduced while the backward pass goes on
therefore costs only the time for which the communication stream stood still.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.align import Matched, align_and_match
from ddpdoctor.measure.numerics import Array, Intervals, covered, nan_median, subtract, union
from ddpdoctor.measure.taxonomy import COMPONENTS, DEVICE_WORK, HOST_IDLE, INDEX, SyncKind
from ddpdoctor.measure.window import Window, arrivals

from .dependencies import stalls
from .graph import CycleGroup, Graph, RankSteps, Sync
from .hostpace import host_paces, with_pace
from .loaderpace import latent_in_windows
from .reckoning import recorded_steps, set_aside

_UNKNOWN_STEP = -1
_FEW_STEPS = 2


def graph_of_windows(windows: Sequence[Window]) -> tuple[Graph, Matched]:
    """Align, match and build. Windows end up on the common clock (in place); one per rank, ordered by
    rank."""
    matched = align_and_match(windows)
    origin = min((w.span[0] for w in windows), default=0)
    usable = len(matched.rows) > 0 and matched.refused is None
    for window in windows:
        _add_unmatched(window, usable)
    groups = _groups(windows, matched, origin) if usable else []
    groups = [group.with_latent("data", latent_in_windows(group, windows)) for group in groups]
    if groups and all(window.on_device for window in windows):
        paces = host_paces(windows)
        groups = [with_pace(group, paces) for group in groups]
    if not groups:
        groups = _alone(windows, origin)
    steps = [_rank_steps(w, origin) for w in windows]
    numbers = recorded_steps(steps)

    def reason(number: int) -> str:
        return "no collectives matched" if number - 1 in numbers else "no step before it in the window"

    graph = Graph(
        "trace",
        tuple(w.rank for w in windows),
        groups,
        steps,
        set_aside(steps, groups, reason),
        matched=len(matched.rows) if usable else 0,
        unmatched=matched.unmatched,
        refused=matched.refused,
        clock_error_ns=matched.error_ns,
        notes=matched.notes,
    )
    return graph, matched


def _add_unmatched(window: Window, matched: bool) -> None:
    """Exposed communication as a component: all of it where nothing was matched, else only what is left
    between collectives."""
    comms = window.comms
    if len(comms):
        exposed = subtract(union(comms.start, comms.end), window.compute)
        taken = union(
            np.concatenate([window.sets[n][0] for n in window.sets]),
            np.concatenate([window.sets[n][1] for n in window.sets]),
        )
        window.sets["unmatched"] = subtract(exposed, taken)


def _work(window: Window, origin: int, left: Array, right: Array) -> Array:
    """[..., C] ns per component in each window; the rest is ``host``."""
    result = np.zeros((*left.shape, len(COMPONENTS)))
    for name, (start, end) in window.sets.items():
        result[..., INDEX[name]] = covered((start - origin, end - origin), left, right)
    result[..., INDEX["host"]] = (right - left) - result.sum(axis=-1)
    return result


def step_of(window: Window, at: NDArray[np.int64]) -> NDArray[np.int64]:
    """[M] step in which each host time lies; -1 outside the marked steps."""
    if not window.steps:
        return np.zeros(len(at), np.int64)
    starts = np.array([start for _, start, _ in window.steps])
    numbers = np.array([number for number, _, _ in window.steps])
    last = window.steps[-1][2]
    index = np.searchsorted(starts, at, side="right") - 1
    return np.where((index >= 0) & (at < last), numbers[np.clip(index, 0, None)], _UNKNOWN_STEP)


def step_of_comms(window: Window) -> NDArray[np.int64]:
    """[M] step in which the host launched each collective; -1 outside the marked steps.

    A kernel whose launch is not in the trace was launched before the window began, by a host that was ahead of its device:
    its own start would put it into a later step. Unless no launch was recorded at all.
    """
    comms = window.comms
    steps = step_of(window, comms.issued)
    unseen = comms.issued >= comms.start
    if window.on_device and not unseen.all():
        steps = np.where(unseen, _UNKNOWN_STEP, steps)
    return steps


def _groups(windows: Sequence[Window], matched: Matched, origin: int) -> list[CycleGroup]:
    """Cycles from the end of one step's last collective of all to the end of the next one's."""
    world = len(windows)
    table = _Table(windows, matched, origin)
    order = np.argsort(table.last_arrival, kind="stable")
    by_step: dict[int, list[int]] = defaultdict(list)
    for m in order:
        by_step[int(table.step[m])].append(int(m))
    steps = sorted(step for step in by_step if step != _UNKNOWN_STEP)
    cuts = {step: table.cuts(by_step[step], world) for step in steps}
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    cycles: dict[tuple[Sync, ...], list[tuple[int, list[int], list[int]]]] = defaultdict(list)
    for before, step in pairwise(steps):
        first, last = cuts[before], cuts[step]
        if first is None or last is None or step != before + 1:
            continue
        low, high = place[first], place[last]
        body = [
            int(m)
            for m in order[low.min() : high.max() + 1]
            if all(low[r] < place[m] <= high[r] for r in np.flatnonzero(table.rows[m] >= 0))
        ]
        cycles[tuple(table.sync(m) for m in body)].append((step, first, body))
    if cycles:
        return [_group(syncs, found, table, windows, origin) for syncs, found in cycles.items() if syncs]
    if len(steps) > _FEW_STEPS:
        # Steps were marked, but no two neighbours matched: their length is known, who waited for whom is not.
        return []
    return _whole_window(windows, table, [int(m) for m in order], steps, origin)


def _whole_window(
    windows: Sequence[Window], table: _Table, order: list[int], steps: list[int], origin: int
) -> list[CycleGroup]:
    """One step, or no steps marked: the window is the cycle, from the earliest event of any rank to the last
    collective of all. What hosts that were ahead of their devices had launched before the one step is not of it: there
    the cycle begins at the last collective of all that is.

    Before its own first event nothing is known of a rank, so that time counts as unseen.
    """
    full = [m for m in order if table.members(m) == len(windows)]
    if not full:
        return []
    body = [m for m in order if table.last_arrival[m] <= table.last_arrival[full[-1]]]
    if steps:
        own = next((place for place, m in enumerate(body) if table.step[m] != _UNKNOWN_STEP), len(body))
        earlier = [m for m in body[:own] if m in full]
        if earlier and own < len(body):
            body = body[body.index(earlier[-1]) + 1 :]
            syncs = tuple(table.sync(m) for m in body)
            return [_group(syncs, [(steps[0], [earlier[-1]] * len(windows), body)], table, windows, origin)]
    for window in windows:
        window.sets["unseen"] = union([origin], [window.span[0]])
    syncs = tuple(table.sync(m) for m in body)
    return [_group(syncs, [(steps[0] if steps else 0, None, body)], table, windows, origin)]


class _Table:
    """Matched collectives as arrays on the common clock, relative to the origin."""

    def __init__(self, windows: Sequence[Window], matched: Matched, origin: int) -> None:
        count, world = matched.rows.shape
        self.windows, self.rows = windows, matched.rows
        self.start = np.full((count, world), np.nan)
        self.end = np.full((count, world), np.nan)
        self.ready = np.full((count, world), np.nan)
        for r, window in enumerate(windows):
            has = matched.rows[:, r] >= 0
            rows = matched.rows[has, r]
            arrival, queued = arrivals(window)
            self.start[has, r] = arrival[rows] - origin
            # Only of one that was queued is it known that it could have started earlier.
            self.ready[has, r] = np.where(queued, window.comms.ready, arrival)[rows] - origin
            self.end[has, r] = window.comms.end[rows] - origin
        self.last_arrival = np.nanmax(self.start, axis=1)
        self.step = self._steps()

    def _steps(self) -> NDArray[np.int64]:
        """The step as the host that launched it knows it, by majority of the ranks."""
        of_rank = [step_of_comms(window) for window in self.windows]
        result = np.empty(len(self.rows), np.int64)
        for m, line in enumerate(self.rows):
            votes = [int(of_rank[r][row]) for r, row in enumerate(line) if row >= 0]
            result[m] = max(set(votes), key=votes.count)
        return result

    def members(self, m: int) -> int:
        return int((self.rows[m] >= 0).sum())

    def cuts(self, found: list[int], world: int) -> list[int] | None:
        """Where each rank's cycle ends: its last reduction of gradients in the step, else its last collective.

        Where all ranks reduce together that is one and the same; with tensor parallelism each group has its
        own. None where a rank has no collective in the step.
        """
        ends: list[int | None] = [None] * world
        for gradients in (True, False):
            for m in found:
                if not gradients or self._kind(m) == "gradients":
                    for r in np.flatnonzero(self.rows[m] >= 0):
                        ends[r] = m
            if all(end is not None for end in ends):
                return [end for end in ends if end is not None]
            ends = [None] * world
        return None

    def _first(self, m: int) -> tuple[Window, int]:
        r = int(np.flatnonzero(self.rows[m] >= 0)[0])
        return self.windows[r], int(self.rows[m, r])

    def _kind(self, m: int) -> str:
        window, row = self._first(m)
        return window.comms.kind[row]

    def sync(self, m: int) -> Sync:
        window, row = self._first(m)
        return Sync(
            window.comms.kind[row],
            window.comms.operation[row],
            tuple(int(r) for r in np.flatnonzero(self.rows[m] >= 0)),
            micro=window.micro_batch(int(window.comms.issued[row])),
            group=window.comms.group[row],
            update=window.update(int(window.comms.issued[row])),
        )

    def message_bytes(self, m: int) -> float:
        window, row = self._first(m)
        return float(window.comms.bytes[row])


def _group(
    syncs: tuple[Sync, ...],
    found: Sequence[tuple[int, list[int] | None, list[int]]],
    table: _Table,
    windows: Sequence[Window],
    origin: int,
) -> CycleGroup:
    index = np.array([body for _, _, body in found])
    ranks = np.arange(len(windows))
    begin = np.array(
        [table.end[first, ranks] if first is not None else np.zeros(len(windows)) for _, first, _ in found]
    )
    arrival, end = table.start[index], table.end[index]
    world = len(windows)
    work = np.zeros((*arrival.shape, len(COMPONENTS)))
    for r in range(world):
        left = begin[:, r].copy()
        for k in range(len(syncs)):
            member = ~np.isnan(arrival[:, k, r])
            if member.any():
                right = arrival[:, k, r]
                work[:, k, r] = np.where(member[:, None], _work(windows[r], origin, left, right), 0.0)
                left = np.where(member, end[:, k, r], left)
    message = np.array([[table.message_bytes(m) for m in body] for _, _, body in found])
    steps = np.array([step for step, _, _ in found], np.int64)
    work = np.nan_to_num(work)
    hidden = _hidden(windows, origin, begin, arrival, end, work)
    computes = [(w.compute[0] - origin, w.compute[1] - origin) for w in windows]
    beside = np.stack([covered(of, arrival[:, :, r], end[:, :, r]) for r, of in enumerate(computes)], axis=2)
    last = np.nanmax(arrival, axis=2)
    before = np.stack([covered(of, arrival[:, :, r], last) for r, of in enumerate(computes)], axis=2)
    exposed = _exposed(computes, arrival, end)
    return CycleGroup(
        *(syncs, steps, begin, arrival, end, work, message),
        hidden=hidden,
        beside=np.nan_to_num(beside),
        beside_wait=np.nan_to_num(before),
        exposed=exposed,
        ready=table.ready[index],
        idle_after=_idle_after(windows, origin, begin, arrival, end),
        on_device=all(window.on_device for window in windows),
        stalls=stalls(computes, arrival, end),
    )


def _exposed(computes: Sequence[Intervals], arrival: Array, end: Array) -> Array:
    """[N, K] ns of each transfer that a faster link would save: the least over the ranks of the time without
    computation beside it."""
    last, over = np.nanmax(arrival, axis=2), nan_median(end, axis=2)
    least = np.clip(over - last, 0, None)
    for r, compute in enumerate(computes):
        beside = covered(compute, last, np.maximum(over, last))
        least = np.where(
            np.isnan(arrival[:, :, r]), least, np.minimum(least, np.clip(over - last - beside, 0, None))
        )
    result: Array = least
    return result


_IDLE = [INDEX[component] for component in HOST_IDLE]


def _hidden(
    windows: Sequence[Window], origin: int, begin: Array, arrival: Array, end: Array, work: Array
) -> Array:
    """[N, K, R, C] ns of computation, copies and late launches in the cycle that lie outside the segments, each beside
    the collective beside which it runs. Where a rank is in several at once, their parts add up to the whole."""
    hidden = np.zeros(work.shape)
    for r, window in enumerate(windows):
        named = {INDEX[name]: window.sets[name] for name in DEVICE_WORK if name in window.sets}
        last = np.nanmax(end[:, :, r], axis=1)
        for c, (start, stop) in named.items():
            here = (start - origin, stop - origin)
            whole = np.nan_to_num(covered(here, begin[:, r], last)) - work[:, :, r, c].sum(axis=1)
            parts = np.nan_to_num(covered(here, arrival[:, :, r], end[:, :, r]))
            share = np.clip(whole, 0, None) / np.maximum(parts.sum(axis=1), 1.0)
            hidden[:, :, r, c] = parts * share[:, None]
        start, stop = window.stalled
        late = covered((start - origin, stop - origin), arrival[:, :, r], end[:, :, r])
        hidden[:, :, r, INDEX["launch"]] = np.nan_to_num(late)
    return hidden


def _idle_after(
    windows: Sequence[Window], origin: int, begin: Array, arrival: Array, end: Array
) -> dict[str, Array]:
    """[N, K, R] ns of each segment that are idle after each kind of waiting."""
    result: dict[str, Array] = {}
    for r, window in enumerate(windows):
        left = np.empty(arrival.shape[:2])
        since = begin[:, r]
        for k in range(arrival.shape[1]):
            left[:, k] = since
            since = np.where(np.isnan(arrival[:, k, r]), since, end[:, k, r])
        for kind, (start, stop) in window.idle_after.items():
            of = result.setdefault(kind, np.zeros(arrival.shape))
            of[:, :, r] = np.nan_to_num(covered((start - origin, stop - origin), left, arrival[:, :, r]))
    return result


def _alone(windows: Sequence[Window], origin: int) -> list[CycleGroup]:
    """Without matched collectives: each rank by itself, from step mark to step mark."""
    bounds = [_bounds(window) for window in windows]
    fewest = min((len(b) for b in bounds), default=0)
    if not fewest:
        return []
    begin = np.array([[b[n][1] - origin for b in bounds] for n in range(fewest)], float)
    end = np.array([[b[n][2] - origin for b in bounds] for n in range(fewest)], float)[:, None, :]
    work = np.stack([_work(w, origin, begin[:, r], end[:, 0, r]) for r, w in enumerate(windows)], axis=1)[
        :, None
    ]
    syncs = (Sync(SyncKind.STEP_END, SyncKind.STEP_END, tuple(range(len(windows)))),)
    steps = np.array([bounds[0][n][0] for n in range(fewest)], np.int64)
    idle_after = _idle_after(windows, origin, begin, end, end)
    unknown = np.full((fewest, 1), np.nan)
    for of in idle_after.values():
        # How long the hosts waited just before the window is not known: they are taken to have waited as in its steps.
        usual = np.median(of[1:], axis=0) if fewest > 1 else of[0]
        of[0] = np.maximum(of[0], np.minimum(usual, work[0][..., _IDLE].sum(axis=-1)))
    return [CycleGroup(syncs, steps, begin, end.copy(), end, work, unknown, idle_after=idle_after)]


def _bounds(window: Window) -> list[tuple[int, int, int]]:
    """Steps that lie in the window; on a device each runs until the next one begins, for the device runs
    behind the host."""
    if not window.steps:
        return [(0, *window.span)] if window.span[1] > window.span[0] else []
    return [(n, a, b) for n, a, b in window.steps if b > a]


def _micro_batches(window: Window, start: int, end: int) -> float:
    inside = int(((window.forwards >= start) & (window.forwards < end)).sum())
    return float(inside) if inside else np.nan


def _rank_steps(window: Window, origin: int) -> RankSteps:
    steps = window.steps
    nothing = np.full(len(steps), np.nan)
    return RankSteps(
        np.array([n for n, _, _ in steps], np.int64),
        np.array([a - origin for _, a, _ in steps], float),
        np.array([b - origin for _, _, b in steps], float),
        nothing,
        nothing.copy(),
        np.array([_micro_batches(window, a, b) for _, a, b in steps], float),
        elements=np.array([window.elements.get(n, np.nan) for n, _, _ in steps], float),
    )
