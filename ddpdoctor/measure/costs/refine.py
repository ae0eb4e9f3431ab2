"""Splitting a late rank's extra computation by what goes with it: more samples, lowered clocks, a CPU it had
to wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.facts import Cost, LateFacts
from ddpdoctor.measure.graph import Graph, RankSteps
from ddpdoctor.measure.numerics import Array

_EVEN = 1.02
_EXPLAINS = 0.5
_FEWEST_KNOWN = 2
Amount = Callable[[RankSteps], Array | None]
_AMOUNTS: tuple[Amount, ...] = (lambda steps: steps.samples, lambda steps: steps.elements)
"""What tells how much work a rank was given: samples, or elements where samples differ in size."""


def refine(late: LateFacts, graph: Graph, throttled: Sequence[int] = ()) -> LateFacts:
    """Move ``compute`` to ``uneven``, ``throttled`` or ``cpu_starved`` where that explains at least half of
    it.

    ``throttled`` are rank numbers whose GPU clocks were lowered for more of the run than the median rank's.
    """
    cost = late.compute
    if cost is not None and cost.ranks:
        amounts = [_more(graph, cost.ranks, of) for of in _AMOUNTS]
        if any(more is not None and more > _EVEN and _explained_by(cost, more) for more in amounts):
            return msgspec.structs.replace(late, compute=None, uneven=cost)
        if set(cost.ranks) & set(throttled):
            return msgspec.structs.replace(late, compute=None, throttled=cost)
    if cost is not None and cost.ranks:
        starved_ms = _extra_run_delay_ms(graph, cost.ranks)
        if starved_ms is not None and starved_ms >= _EXPLAINS * cost.ms_per_step:
            return msgspec.structs.replace(late, compute=None, cpu_starved=cost)
    return late


def _explained_by(cost: Cost, more: float) -> bool:
    """Whether time that grows with the amount of work would give at least half of the excess."""
    typical = cost.typical_ms or 0.0
    extra = (cost.own_ms or 0.0) - typical
    return extra <= 0 or typical * (more - 1.0) >= _EXPLAINS * extra


def _more(graph: Graph, ranks: Sequence[int], amount: Amount) -> float | None:
    """The amount of work of the late ranks relative to the median of the others."""
    means = {
        rank: _mean_known(values)
        for rank, steps in zip(graph.ranks, graph.steps, strict=True)
        if (values := amount(steps)) is not None
    }
    own = [m for rank in ranks if (m := means.get(rank)) is not None]
    others = [m for rank, m in means.items() if rank not in ranks and m is not None]
    if own and others and np.median(others):
        return float(np.mean(own)) / float(np.median(others))
    return None


def _mean_known(values: np.ndarray) -> float | None:  # type: ignore[type-arg]
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) >= _FEWEST_KNOWN else None


def _median_known(values: np.ndarray) -> float | None:  # type: ignore[type-arg]
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) >= _FEWEST_KNOWN else None


def _extra_run_delay_ms(graph: Graph, ranks: Sequence[int]) -> float | None:
    """Time per step that the late ranks waited for a CPU beyond their due.

    On a busy machine whoever computes longer also waits longer: their due is the others' wait for each ms that
    the others ran.
    """
    measured = np.array(sorted({int(s) for group in graph.groups for s in group.steps}))
    own: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    for rank, steps in zip(graph.ranks, graph.steps, strict=True):
        chosen = np.isin(steps.steps, measured)
        delay = _median_known(steps.run_delay[chosen])
        ran = None if steps.cpu is None else _median_known(steps.cpu[chosen])
        if delay is not None and ran:
            (own if rank in ranks else others).append((delay, ran))
    if not own or not others:
        return None
    due = float(np.median([delay / ran for delay, ran in others]))
    return float(np.mean([delay - due * ran for delay, ran in own])) / 1e6
