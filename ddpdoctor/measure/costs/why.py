"""Finds why a straggler takes longer: more samples, lowered clocks, CPU contention, one phase of the step only, or blocked off-CPU.

A rank that is slower at the same work, because of its clocks, its cores or another process, is slower in forward, backward and optimizer.
Additional work is in one phase. Times cannot distinguish more: kernels that are slower in one phase look like additional kernels.

The excess of a late rank is partly estimated: the operators' share of a gap, waiting that hides work, work that is only slower. A
report shows the recorded events next to it. So :func:`confirmed_by_events` compares the ranks again by these events alone, in the
steps in which the rank is late: a rank that computes longer must have longer phases, not longer gaps between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.measure.attribution import others_median, proportional_gap_excess
from ddpdoctor.measure.facts import Cost
from ddpdoctor.measure.graph import Graph, RankSteps
from ddpdoctor.measure.numerics import Array, Ints, median_error, scatter_of
from ddpdoctor.measure.taxonomy import (
    BETWEEN_PHASES,
    COMPUTATION,
    INDEX,
    LATE_COMPONENTS,
    PHASES,
    WAITING_FOR_DATA,
    Component,
    Components,
    LateCause,
)

_RECORDED = [INDEX[name] for name in (*WAITING_FOR_DATA, Component.CHECKPOINT)]
"""Components that are or may be waiting, and are reported separately."""


class _Tuning(msgspec.Struct, frozen=True):
    even: float = 1.02
    """Multiple of the others' amount of work up to which amounts count as equal: batches of a sampler differ by a sample."""
    explains: float = 0.5
    """Minimum part of the excess that a cause explains."""
    seldom: float = 0.5
    """If the excess occurs in a smaller part of the steps, the other steps show the rank's usual wait for a CPU, and only the wait beyond
    that counts."""
    fewest_known: int = 2
    """Minimum number of steps with a known amount."""
    least: float = 0.25
    """Minimum part of the excess that a general slowdown would cause in the other phases; with less, they are too short to show it."""
    part: float = 0.25
    """Maximum part of that slowdown in the other phases: half-way between none and half of it."""
    sigmas: float = 2.0
    """Standard errors added to the measured slowdown: one-sided error rate of 1 in 40."""
    shows: float = 0.5
    """Part of the lateness from which events of another kind of work are named instead, if those of the cause show less than that."""


_TUNING = _Tuning()


def awake_longer_ms(graph: Graph, removed: Sequence[Array], positions: Sequence[int]) -> float | None:
    """ms per step by which the training threads of these ranks ran or were runnable longer than those of the others, mean over the ranks.

    Of the steps in which they are late by ``removed`` [N, K, R] ns per group. None if the scheduler's times are unknown, or on a device,
    because its host sleeps while it waits for it.
    """
    if any(group.on_device for group in graph.groups):
        return None
    numbers = graph.numbers
    late = np.concatenate([of_group.sum(axis=1) for of_group in removed])
    longer_ns = []
    for position in positions:
        awake_ns = _awake_ns(graph, numbers[late[:, position] > 0])
        theirs_ns = np.delete(awake_ns, positions)
        theirs_ns = theirs_ns[~np.isnan(theirs_ns)]
        if np.isnan(awake_ns[position]) or not len(theirs_ns):
            return None
        longer_ns.append(awake_ns[position] - np.median(theirs_ns))
    return float(np.mean(longer_ns)) / 1e6 if longer_ns else None


def awake_of_all_ms(graph: Graph, own_ms: float | None) -> float | None:
    """``own_ms``, the host work of all ranks in ms per step, less all off-CPU time that is not recorded as waiting: a lower bound of the
    host work in which the training threads ran or were runnable. None if ``own_ms`` or the scheduler's times are unknown, or on devices."""
    if own_ms is None or not graph.groups or any(group.on_device for group in graph.groups):
        return None
    awake_ns = _awake_ns(graph, graph.numbers)
    if np.isnan(awake_ns).any():
        return None
    waited = [
        np.nan_to_num(group.end - group.arrival).sum(axis=1) + group.work[..., _RECORDED].sum(axis=(1, 3))
        for group in graph.groups
    ]
    asleep_ns = np.median(graph.lengths_ns[:, None] - np.concatenate(waited), axis=0) - awake_ns
    return max(own_ms - max(float(asleep_ns.min()), 0.0) / 1e6, 0.0)


def _awake_ns(graph: Graph, numbers: Ints) -> Array:
    """[R] ns that the training threads ran or were runnable, median of these steps; NaN if unknown."""
    found = np.full(len(graph.steps), np.nan)
    for place, of_rank in enumerate(graph.steps):
        awake_ns = (of_rank.cpu + np.nan_to_num(of_rank.run_delay))[np.isin(of_rank.steps, numbers)]
        awake_ns = awake_ns[~np.isnan(awake_ns)]
        if len(awake_ns):
            found[place] = np.median(awake_ns)
    return found


def slower_phase(graph: Graph, positions: Sequence[int]) -> Component | None:
    """The only phase in which these ranks compute longer; None if other phases are longer too, or are too short to show it."""
    others = [position for position in range(len(graph.ranks)) if position not in positions]
    if not others or not positions:
        return None
    work = np.concatenate(
        [group.work[..., [INDEX[phase] for phase in PHASES]].sum(axis=1) for group in graph.groups]
    )
    usual = np.median(work[:, others], axis=1)
    more = work[:, list(positions)].mean(axis=1) - usual
    longest = int(np.median(more, axis=0).argmax())
    rest = [place for place in range(len(PHASES)) if place != longest]
    excess, typical = float(np.median(more[:, longest])), float(np.median(usual[:, longest]))
    if excess <= 0 or typical <= 0:
        return None
    slower = excess / typical * float(np.median(usual[:, rest].sum(axis=1)))
    in_rest = more[:, rest].sum(axis=1)
    middle = np.median(in_rest)
    # Upper confidence limit of the median.
    most = middle + _TUNING.sigmas * median_error(scatter_of(in_rest - middle), len(in_rest))
    return PHASES[longest] if slower >= _TUNING.least * excess and most <= _TUNING.part * slower else None


Amount = Callable[[RankSteps], Array]
_AMOUNTS: tuple[Amount, ...] = (lambda steps: steps.samples, lambda steps: steps.elements)
"""Measures of a rank's amount of work: samples, or elements if samples differ in size."""


def cause_of_computing_longer(
    cost: Cost, graph: Graph, hit_steps: Ints, throttled: Sequence[int] = ()
) -> LateCause:
    """``uneven`` or ``cpu_starved`` if that explains at least half of the cost, ``throttled`` if one of the ranks is, else ``compute``.

    ``hit_steps`` are the numbers of the steps in which the ranks compute longer. ``throttled`` are the numbers of ranks whose GPU
    clocks were lowered more than the others'.
    """
    if not cost.ranks:
        return LateCause.COMPUTE
    typical_ms = cost.typical_ms or 0.0
    extra_ms = (cost.own_ms or 0.0) - typical_ms
    for amount in _AMOUNTS:
        more = _relative_amount(graph, cost.ranks, amount)
        # The excess that is proportional to the additional amount of work.
        explains = extra_ms <= 0 or typical_ms * (more - 1.0) >= _TUNING.explains * extra_ms
        if more > _TUNING.even and explains:
            return LateCause.UNEVEN
    if set(cost.ranks) & set(throttled):
        return LateCause.THROTTLED
    # The cost per step in which it occurs.
    each_time_ms = cost.ms_per_step * (cost.steps_seen / cost.steps_hit if cost.steps_hit else 1.0)
    starved = _is_starved(graph, cost.ranks, hit_steps, each_time_ms)
    return LateCause.CPU_STARVED if starved else LateCause.COMPUTE


def _relative_amount(graph: Graph, ranks: Sequence[int], amount: Amount) -> float:
    """The amount of work of the late ranks relative to the median of the others; 1.0 if unknown."""
    means = {
        rank: _summary_of_known(amount(steps), np.mean)
        for rank, steps in zip(graph.ranks, graph.steps, strict=True)
    }
    own = [m for rank in ranks if (m := means.get(rank)) is not None]
    others = [m for rank, m in means.items() if rank not in ranks and m is not None]
    if own and others and np.median(others):
        return float(np.mean(own)) / float(np.median(others))
    return 1.0


def _summary_of_known(values: Array, summary: Callable[[Array], Any]) -> float | None:
    """``summary`` (mean or median) of the known values; None with too few."""
    known = values[~np.isnan(values)]
    return float(summary(known)) if len(known) >= _TUNING.fewest_known else None


def _is_starved(graph: Graph, ranks: Sequence[int], hit_steps: Ints, each_time_ms: float) -> bool:
    """Whether CPU contention explains the excess: in ``hit_steps``, the late ranks' training threads waited for a CPU for most of
    ``each_time_ms``, and longer than their extra running time. False if the scheduler's times are unknown for these or the other ranks."""
    measured = np.unique(graph.numbers)
    seldom = len(hit_steps) < _TUNING.seldom * len(measured)
    in_hit = _scheduled(graph, hit_steps)
    in_other_steps = _scheduled(graph, np.setdiff1d(measured, hit_steps)) if seldom else {}
    others = [of_rank for rank, of_rank in in_hit.items() if rank not in ranks]
    own = {rank: of_rank for rank, of_rank in in_hit.items() if rank in ranks}
    if not own or not others:
        return False
    # On a busy machine, longer computation also means a longer wait. So the wait that follows from the others' wait per running time is
    # subtracted, or the rank's own wait in the other steps, if these are the majority and it is larger.
    usual_rate = float(np.median([delay / ran for delay, ran in others]))
    waited = [
        delay - max(usual_rate * ran, in_other_steps[rank][0] if rank in in_other_steps else 0.0)
        for rank, (delay, ran) in own.items()
    ]
    # A thread that is late only because it waits for a CPU runs no longer than the others.
    usual_ran = np.median([ran for _, ran in others])
    ran_longer_ns = float(np.mean([ran - usual_ran for _, ran in own.values()]))
    return float(np.mean(waited)) >= max(_TUNING.explains * each_time_ms * 1e6, ran_longer_ns)


def _scheduled(graph: Graph, steps: Ints) -> dict[int, tuple[float, float]]:
    """Rank → (run delay, running time) of its training thread: medians of these steps, ns. Without ranks for which they are unknown."""
    found: dict[int, tuple[float, float]] = {}
    for rank, of_rank in zip(graph.ranks, graph.steps, strict=True):
        chosen = np.isin(of_rank.steps, steps)
        delay = _summary_of_known(of_rank.run_delay[chosen], np.median)
        ran = _summary_of_known(of_rank.cpu[chosen], np.median)
        if delay is not None and ran:
            found[rank] = delay, ran
    return found


def confirmed_by_events(
    drawn: Array, cause: LateCause, removed: Sequence[Array], positions: Sequence[int]
) -> dict[str, Any]:
    """The fields ``late_ms``, ``drawn_ms`` (median of each rank's late cycles, or mean if medians do not agree; mean over the ranks) and
    ``drawn_as`` of a cost.

    ``drawn`` [cycles, R, C] is the recorded work, ``removed`` [N, K, R] ns per group the excess of these ranks for the cause. {} if they
    have no excess, or if nothing of that kind is recorded.
    """
    lateness_ns = np.concatenate([of_group.sum(axis=1) for of_group in removed])
    hits = {
        position: lateness_ns[:, position] > 0
        for position in positions
        if (lateness_ns[:, position] > 0).any()
    }
    components = LATE_COMPONENTS.get(cause)
    if not hits or components is None or cause == LateCause.UNKNOWN:
        return {}
    if cause == LateCause.COMPUTE and not np.median(_work_of(drawn, COMPUTATION), axis=0)[list(hits)].any():
        return {}

    def in_their_steps(summary: Callable[[Array], Any]) -> tuple[float, dict[LateCause, float]]:
        """(lateness, excess that is recorded of each kind of work) in the steps in which the ranks are late, ms."""

        def of_ranks(values: Array) -> float:
            return float(np.mean([summary(values[hit, position]) for position, hit in hits.items()])) / 1e6

        kinds = [kind for kind in LATE_COMPONENTS if kind != LateCause.UNKNOWN]
        return of_ranks(lateness_ns), {kind: of_ranks(_excess(drawn, kind)) for kind in kinds}

    # Medians, so that single long steps do not decide; but the rank may be late in every second of these steps only.
    late_ms, shown_ms = in_their_steps(np.median)
    if shown_ms[cause] < _TUNING.shows * late_ms:
        late_ms, shown_ms = in_their_steps(np.mean)
    elsewhere = max((kind for kind in shown_ms if kind != cause), key=lambda kind: shown_ms[kind])
    is_named = shown_ms[cause] < _TUNING.shows * late_ms <= shown_ms[elsewhere]
    return {"late_ms": late_ms, "drawn_ms": shown_ms[cause], "drawn_as": elsewhere if is_named else None}


def _work_of(drawn: Array, components: Components) -> Array:
    """[cycles, R] ns."""
    whole: Array = drawn[:, :, [INDEX[name] for name in components]].sum(axis=2)
    return whole


def _excess(drawn: Array, cause: LateCause) -> Array:
    """[cycles, R] ns excess of a kind of work over the median of the other ranks. If a rank is slower in its phases, the excess in the gaps
    between them counts as computation up to the same proportion."""
    own = _work_of(drawn, LATE_COMPONENTS[cause])
    beyond: Array = own - others_median(own)
    if cause != LateCause.COMPUTE:
        return beyond
    return beyond + proportional_gap_excess(
        _work_of(drawn, (*BETWEEN_PHASES, Component.HOST)), _work_of(drawn, PHASES)
    )
