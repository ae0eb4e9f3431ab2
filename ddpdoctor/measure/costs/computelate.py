"""Why a straggler computes longer, by what goes with it: more samples, lowered clocks, a CPU it had to wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.facts import Cost
from ddpdoctor.measure.graph import Graph, RankSteps
from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.taxonomy import LateCause

Amount = Callable[[RankSteps], Array | None]
_AMOUNTS: tuple[Amount, ...] = (lambda steps: steps.samples, lambda steps: steps.elements)
"""What tells how much work a rank was given: samples, or elements where samples differ in size."""


class _Tuning(msgspec.Struct, frozen=True):
    even: float = 1.02
    """Times the others' amount of work up to which a rank was given as much: batches of a sampler differ by a sample."""
    explains: float = 0.5
    """Part of the excess that goes with something, for that to be its cause: most of it, as elsewhere."""
    fewest_known: int = 2
    """Steps of which the amount is known."""


_TUNING = _Tuning()


def cause_of_computing_longer(cost: Cost, graph: Graph, throttled: Sequence[int] = ()) -> LateCause:
    """``uneven``, ``throttled`` or ``cpu_starved`` where that explains at least half of the cost, else ``compute``.

    ``throttled`` are rank numbers whose GPU clocks were lowered for more of the run than the median rank's.
    """
    if not cost.ranks:
        return LateCause.COMPUTE
    amounts = [_more(graph, cost.ranks, amount) for amount in _AMOUNTS]
    if any(more is not None and more > _TUNING.even and _explained_by(cost, more) for more in amounts):
        return LateCause.UNEVEN
    if set(cost.ranks) & set(throttled):
        return LateCause.THROTTLED
    starved = _starved(graph, cost.ranks)
    if starved is not None and starved.waited_ms >= max(
        _TUNING.explains * cost.ms_per_step, starved.ran_longer_ms
    ):
        return LateCause.CPU_STARVED
    return LateCause.COMPUTE


def _explained_by(cost: Cost, more: float) -> bool:
    """Whether time that grows with the amount of work would give at least half of the excess."""
    typical = cost.typical_ms or 0.0
    extra = (cost.own_ms or 0.0) - typical
    return extra <= 0 or typical * (more - 1.0) >= _TUNING.explains * extra


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


def _mean_known(values: Array) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) >= _TUNING.fewest_known else None


def _median_known(values: Array) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) >= _TUNING.fewest_known else None


class _Starved(msgspec.Struct, frozen=True):
    """What the scheduler says of the late ranks' training threads, per step."""

    waited_ms: float
    """For a CPU, beyond their due: on a busy machine whoever computes longer also waits longer, and the others' wait for each
    ms that they ran is due."""
    ran_longer_ms: float
    """On a CPU, beyond the median of the others: a thread that only waits for a CPU runs as long as theirs."""


def _starved(graph: Graph, ranks: Sequence[int]) -> _Starved | None:
    """None where it is not known of the late ranks and of others."""
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
    usual = float(np.median([ran for _, ran in others]))
    return _Starved(
        float(np.mean([delay - due * ran for delay, ran in own])) / 1e6,
        float(np.mean([ran - usual for _, ran in own])) / 1e6,
    )
