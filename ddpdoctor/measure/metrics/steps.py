"""Breakdown of a step, per rank and on the critical path; facts about step times and batch sizes; and the cost of ddpdoctor's profiler
window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.facts import StepFacts
from ddpdoctor.measure.graph import CycleGroup, Graph, measured_steps
from ddpdoctor.measure.numerics import Array, format_duration
from ddpdoctor.measure.steplog import (
    AROUND_WINDOW,
    OPENED,
    PROFILED,
    SUSPENDED,
    RankLog,
    longest_ns,
    recorded_everywhere,
)
from ddpdoctor.measure.summary import WindowCost
from ddpdoctor.measure.taxonomy import COMPONENTS, HOST_IDLE, INDEX, PARTS, Component, Part, SyncKind, part_of

_COLUMN: dict[Part, int] = {part: place for place, part in enumerate(PARTS)}
"""Part → its index on the last axis."""


class Split(NamedTuple):
    """The time of the members in a synchronisation, [N, members] ns each."""

    wait: Array
    """Exposed wait: the rank waits for another one without computing."""
    transfer: Array
    """Exposed transfer."""
    hidden_wait: Array
    """Computation while the rank waits."""
    hidden_transfer: Array
    """Computation during the transfer."""


def splits(group: CycleGroup) -> Iterator[Split]:
    """Yield the split of each synchronisation. If a rank is in several at the same time, the time counts in the first."""
    over = group.begin.copy()
    for k, sync in enumerate(group.syncs):
        own = list(sync.members)
        arrival, released, end = (of[:, k, own] for of in (group.arrival, group.released, group.end))
        new = 1.0 - np.clip((over[:, own] - arrival) / np.maximum(end - arrival, 1.0), 0.0, 1.0)
        over[:, own] = np.maximum(over[:, own], end)
        hidden = np.minimum(group.concurrent_compute[:, k, own], end - arrival)
        in_wait = np.minimum(
            group.concurrent_compute_in_wait[:, k, own], np.minimum(hidden, released - arrival)
        )
        in_transfer = hidden - in_wait
        yield Split(
            new * (released - arrival - in_wait),
            new * (end - released - in_transfer),
            new * in_wait,
            new * in_transfer,
        )


def rank_breakdown(graph: Graph) -> Array:
    """Return [R, parts] ns, mean over the cycles. A rank's row adds up to its mean cycle."""
    if not graph.groups:
        return np.zeros((len(graph.ranks), len(PARTS)))
    means: Array = np.concatenate([cycle_breakdown(group) for group in graph.groups]).mean(axis=0)
    return means


def cycle_breakdown(group: CycleGroup) -> Array:
    """Return [N, R, parts] ns of each cycle of a group. Communication that overlaps with the rank's computation counts as computation."""
    cycles, _, world = group.arrival.shape
    result = np.zeros((cycles, world, len(PARTS)))
    for c, component in enumerate(COMPONENTS):
        # Collectives of several process groups run concurrently, so a segment between two of them may be empty.
        result[:, :, _COLUMN[part_of(component, group.on_device)]] += np.nansum(
            np.clip(group.work[:, :, :, c], 0, None), axis=1
        )
    for sync, split in zip(group.syncs, splits(group), strict=True):
        own = list(sync.members)
        barrier = sync.kind == SyncKind.BARRIER
        result[:, own, _COLUMN[Part.COMPUTE]] += split.hidden_wait + split.hidden_transfer
        result[:, own, _COLUMN[Part.BARRIER if barrier else Part.COMM_WAIT]] += split.wait
        result[:, own, _COLUMN[Part.BARRIER if barrier else Part.COMM_TRANSFER]] += split.transfer
    return result


def critical_breakdown(graph: Graph, profiler_ns: float = 0.0) -> dict[str, float]:
    """Return the share of each part in the critical path; they add up to 1. {} without cycles. ``profiler_ns`` per cycle is subtracted from
    the host's part, see :func:`added_by_profiler`.

    The path is followed backwards: from a synchronisation's end to its last arrival (transfer), along that rank's work to the end of
    the previous synchronisation, and so on. It contains no waiting. Transfer that overlaps with the rank's computation counts as
    computation, because it costs nothing.
    """
    total = np.zeros(len(PARTS))
    for group in graph.groups:
        total += _critical_path(group)[0]
    total[_COLUMN[Part.HOST]] -= profiler_ns * graph.cycles
    whole = float(total.sum())
    return {part: float(total[column]) / whole for part, column in _COLUMN.items()} if whole > 0 else {}


def with_data_wait_of(breakdown: dict[str, float], run: Graph) -> dict[str, float]:
    """Return the ``breakdown`` of a window with the share of waiting for data of the whole ``run``, which a few steps may not show. The
    other parts keep their ratios."""
    waiting, before = critical_breakdown(run).get(Part.DATA_WAIT), breakdown.get(Part.DATA_WAIT)
    if waiting is None or before is None or before >= 1.0:
        return breakdown
    rest = (1.0 - waiting) / (1.0 - before)
    return {part: waiting if part == Part.DATA_WAIT else rest * share for part, share in breakdown.items()}


def critical_work(graph: Graph) -> dict[Component, float]:
    """Return the share of each component of work in the critical path; {} without cycles. The rest of the path is in synchronisations."""
    both = [_critical_path(group) for group in graph.groups]
    whole = float(sum(parts.sum() for parts, _ in both))
    work = sum((work for _, work in both), np.zeros(len(COMPONENTS)))
    return {each: float(work[INDEX[each]]) / whole for each in COMPONENTS} if whole > 0 else {}


def host_idle_ns(graph: Graph) -> float:
    """Return the mean ns per cycle of the critical path in which a device waits for its host."""
    work = critical_work(graph)
    return graph.mean_cycle_ns * sum(work.get(each, 0.0) for each in HOST_IDLE)


def added_by_profiler(window: Graph, log: Graph) -> float:
    """Return the ns by which a cycle of a device's window is longer than an unprofiled step of the step log; 0 if it is not.

    This is the lesser of the differences of medians and of means: a few steps may be longer for another reason, and single steps of a log
    are short or long if the host runs ahead of its device. The profiler slows down the host, so that the device waits longer for it. If the
    difference is longer than the device's waits for its host, the profiled steps have more work than others, the profiler's part is
    unknown, and the result is 0.
    """
    by_median = float(np.median(window.lengths_ns) - np.median(log.lengths_ns))
    added_ns = min(by_median, window.mean_cycle_ns - log.mean_cycle_ns)
    return added_ns if 0.0 < added_ns < host_idle_ns(window) else 0.0


def _critical_path(group: CycleGroup) -> tuple[Array, Array]:
    """[parts] ns of the critical path, and [components] ns of the work in it, summed over the cycles of one group."""
    cycles, count, _ = group.arrival.shape
    rows = np.arange(cycles)
    total, work = np.zeros(len(PARTS)), np.zeros(len(COMPONENTS))
    rank = np.nanargmax(np.nanmax(group.end, axis=1), axis=1)
    for k in range(count - 1, -1, -1):
        sync = group.syncs[k]
        here = np.isin(rank, sync.members)
        if not here.any():
            continue
        own_end = group.end[rows, k, rank]
        rank = np.where(here, _waited_for(group, k, rank), rank)
        spent = np.where(here, own_end - group.arrival[rows, k, rank], 0.0)
        hidden = np.clip(np.minimum(group.concurrent_compute[rows, k, rank], spent), 0, None)
        part = Part.BARRIER if sync.kind == SyncKind.BARRIER else Part.COMM_TRANSFER
        total[_COLUMN[Part.COMPUTE]] += hidden.sum()
        total[_COLUMN[part]] += (spent - hidden).sum()
        for c, component in enumerate(COMPONENTS):
            spent_ns = np.where(here, group.work[rows, k, rank, c], 0.0).sum()
            total[_COLUMN[part_of(component, group.on_device)]] += spent_ns
            work[c] += spent_ns
    return np.clip(total, 0, None), np.clip(work, 0, None)


def _waited_for(group: CycleGroup, k: int, rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N] the rank for which ``rank`` ([N], one per cycle) waited at synchronisation ``k``: the last to arrive, the root of a
    broadcast, or itself."""
    sync, rows = group.syncs[k], np.arange(len(rank))
    if sync.kind == SyncKind.STEP_END:
        return rank
    latest: NDArray[np.int64] = np.nanargmax(np.nan_to_num(group.arrival[:, k], nan=-np.inf), axis=1)
    if sync.root is None:
        return latest
    own_arrival, own_end = group.arrival[rows, k, rank], group.end[rows, k, rank]
    waits_for_all = own_end >= np.nanmax(group.arrival[:, k, list(sync.members)], axis=1)
    root_late = group.arrival[:, k, sync.root] > own_arrival
    return np.where(waits_for_all, latest, np.where(root_late, sync.root, rank))


class Tuning(msgspec.Struct, frozen=True):
    """When long steps get a note."""

    note_ratio: float = 1.1
    """Ratio of mean to median above which there is a note if a few steps cause most of the difference."""
    tail_note_ratio: float = 1.5
    """Ratio of mean to median above which there is a note if the mean also exceeds the 95th percentile."""
    steps_per_few: int = 100
    """A few steps are one in this many."""
    least_few: int = 3
    """Or at least this many. The note names as many."""


_TUNING = Tuning()


def step_facts(
    graph: Graph, seen: int, operators_seen: bool, input_explains: float | None, world_size: int | None
) -> StepFacts:
    """Return the facts about the times of measured cycles and about batch sizes.

    ``graph``: the one for step times; ``seen``: number of recorded steps; ``operators_seen`` and ``input_explains``: the facts of these
    names. Totals over all ranks are unknown if fewer than ``world_size`` ranks were recorded.
    """
    if not graph.groups:
        return StepFacts(
            source=graph.source, seen=seen, operators_seen=operators_seen, input_explains=input_explains
        )
    lengths_ns = graph.lengths_ns
    mean_ns, median_ns = float(lengths_ns.mean()), float(np.median(lengths_ns))
    samples = _rank_means(graph, [steps.samples for steps in graph.steps])
    batches = _rank_means(graph, [steps.batch for steps in graph.steps])
    whole = world_size is None or len(graph.ranks) >= world_size
    per_step = float(samples.sum()) if samples is not None and whole else None
    # Backward passes per step, median over the steps and ranks.
    passes = [
        float(np.nanmedian(of.micro_batches)) for of in graph.steps if not np.isnan(of.micro_batches).all()
    ]
    micro_batches = (float(np.median(passes)) or None) if passes else None
    return StepFacts(
        source=graph.source,
        seen=seen,
        measured=len(lengths_ns),
        mean_ms=mean_ns / 1e6,
        median_ms=median_ns / 1e6,
        p95_ms=float(np.quantile(lengths_ns, 0.95)) / 1e6,
        samples_per_s=per_step / (mean_ns / 1e9) if per_step else None,
        samples=None if samples is None else float(np.median(samples)),
        batch_size=None if batches is None else float(np.median(batches)),
        batch_size_most=_largest_ratio(samples),
        input_most=_largest_ratio(_rank_means(graph, [steps.elements for steps in graph.steps])),
        micro_batches=micro_batches,
        input_explains=input_explains,
        marked=any(len(steps.steps) for steps in graph.steps),
        operators_seen=operators_seen,
    )


def longest_steps_note(graph: Graph) -> list[str]:
    """Return a note on the longest measured steps, if a few of them take much of the time."""
    if not graph.groups:
        return []
    lengths_ns = graph.lengths_ns
    mean_ns, median_ns = float(lengths_ns.mean()), float(np.median(lengths_ns))
    excess_ns = np.sort(np.maximum(lengths_ns - median_ns, 0.0))
    few = max(_TUNING.least_few, len(excess_ns) // _TUNING.steps_per_few)
    few_excess_ns = float(excess_ns[-few:].sum())
    few_matter = mean_ns > _TUNING.note_ratio * median_ns and few_excess_ns > excess_ns.sum() / 2
    if not few_matter and mean_ns <= max(
        float(np.quantile(lengths_ns, 0.95)), _TUNING.tail_note_ratio * median_ns
    ):
        return []
    order = np.argsort(-lengths_ns, kind="stable")[: _TUNING.least_few]
    order = order[lengths_ns[order] > _TUNING.note_ratio * median_ns]
    longest = ", ".join(f"{graph.numbers[i]} ({_step_time(float(lengths_ns[i]))})" for i in order)
    most = "most" if lengths_ns.sum() < 2 * few_excess_ns else "much"
    steps = "The longest are steps" if len(order) > 1 else "The longest is step"
    return [f"A few steps take {most} of the time. {steps} {longest}."]


def _step_time(ns: float) -> str:
    """A step time: "180 ms", "1.5 s"."""
    return f"{ns / 1e6:.3g} ms" if ns < 999_500_000 else format_duration(ns)


def _rank_means(graph: Graph, amounts: Sequence[Array]) -> Array | None:
    """[R] mean amount per measured step; ``amounts``: for each rank, [N] values of its steps. None if a rank has none."""
    measured = list(measured_steps(graph.groups))
    known = [
        values[np.isin(steps.steps, measured) & ~np.isnan(values)]
        for steps, values in zip(graph.steps, amounts, strict=True)
    ]
    return (
        np.array([float(np.mean(of_rank)) for of_rank in known]) if known and all(map(len, known)) else None
    )


def _largest_ratio(amounts: Array | None) -> float | None:
    """Largest amount of a rank / median of the other ranks."""
    if amounts is None or len(amounts) < 2 or not np.median(amounts):
        return None
    leader = int(amounts.argmax())
    others = float(np.median(np.delete(amounts, leader)))
    return float(amounts[leader]) / others if others else None


def window_cost(logs: Sequence[RankLog], usual_ms: float | None) -> WindowCost | None:
    """Return the cost of the window, from steps that all ranks recorded, relative to the usual step time ``usual_ms``. The length of a
    step is that of its slowest rank. None if no window was open, or the usual step time is unknown."""
    everywhere = recorded_everywhere(logs)
    length = {number: longest_ns(steps) / 1e6 for number, steps in everywhere.items()}
    marks = {number: {mark for step in steps for mark in step.marks} for number, steps in everywhere.items()}
    inside = [n for n in everywhere if PROFILED in marks[n]]
    # Later windows were requested by the user during the run: their cost does not count.
    requested = next((n for n in inside[1:] if OPENED in marks[n]), None)
    inside = [n for n in inside if requested is None or n < requested]
    if usual_ms is None or not inside:
        return None
    # The profiler's kernels and threads end in the step after the one that opens, closes or saves it.
    around = {n + later for n in everywhere if marks[n].intersection(AROUND_WINDOW) for later in (0, 1)}
    suspended = {n + later for n in everywhere if SUSPENDED in marks[n] for later in (0, 1)}
    affected = around.intersection(everywhere).union(inside) - suspended
    captures = [n for n in everywhere if n > inside[-1] and OPENED in marks[n]]
    affected = {n for n in affected if not captures or n < captures[0]}
    quiet = [n for n in inside if OPENED not in marks[n]] or inside
    return WindowCost(
        first=inside[0],
        last=inside[-1],
        step_ms=float(np.median([length[n] for n in quiet])),
        extra_ms=max(0.0, sum(length[n] - usual_ms for n in affected)),
    )
