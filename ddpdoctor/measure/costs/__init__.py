"""Price each cause: how much shorter a step would be without it.

In: a :class:`Context`, the results of all earlier stages. Out: costs by the path of their fact. A cause costs what a replay
without it saves. Each pricer (``Context`` → ``Costs``) handles its own causes; :func:`merge` combines two prices of one cause.
"""

from __future__ import annotations

from collections.abc import Callable

from ddpdoctor.measure.facts import scaled
from ddpdoctor.measure.metrics import host_idle_ns

from .buckets import (
    Reduction,
    bucket_savings,
    disturbed_ns,
    favoured_cap_bytes,
    transfer_costs,
)
from .confirmation import confirmed_by_events
from .context import Context, Costs, RareSource, ReducerCosts
from .excluded_steps import epoch_starts, evaluations_on_some_ranks
from .late import arrival_facts, late_work, regularly_late
from .merge import costs_under, merge
from .rare import lengthening_share, rare_costs, rare_pauses
from .shared import (
    redundant_reductions,
    shared_synchronisations,
    shared_work,
    starved_of_cpu,
    usual_transfer,
    without_reductions,
)

Pricer = Callable[[Context], Costs]

PRICERS: tuple[Pricer, ...] = (
    late_work,
    shared_work,
    epoch_starts,
    shared_synchronisations,
    redundant_reductions,
    starved_of_cpu,
    transfer_costs,
)
"""Pricers that replay the primary graph; they run where it has cycles. Where two of them price one cause, the larger price is
used; of equal ones the first."""
PRICERS_OF_RECORDINGS: tuple[Pricer, ...] = (rare_pauses, evaluations_on_some_ranks)
"""Pricers that use the recordings themselves; they always run, after :data:`PRICERS`."""


_OF_HOSTS = ("late.host", "shared.device_sync", "shared.host", "shared.launch", "shared.outside")
"""Paths of the costs that are a device's waiting for its host."""


def _without_profiler(costs: Costs, context: Context) -> Costs:
    """The costs of a window as parts of a step without profiler: devices wait less for hosts, and all else takes as long."""
    idle_ns, step_ms = host_idle_ns(context.graph), context.mean_step_ms
    if not context.profiler_ns or not step_ms:
        return costs
    part, spent = 1.0 - context.profiler_ns / idle_ns, ("own_ms", "typical_ms", "occurrence_ms")
    return {
        path: scaled(cost, part if path in _OF_HOSTS else 1.0, step_ms, also=spent)
        for path, cost in costs.items()
    }


def price_all(context: Context, progress: Callable[[int, int], None] | None = None) -> Costs:
    """Costs of all causes, each once; ``progress(done, total)`` is called before each pricer."""
    pricers = [*(PRICERS if context.graph.groups else ()), *PRICERS_OF_RECORDINGS]
    priced = []
    for done, pricer in enumerate(pricers):
        if progress is not None:
            progress(done, len(pricers))
        costs = pricer(context)
        priced.append(_without_profiler(costs, context) if pricer in PRICERS else costs)
    return merge(priced, context.mean_step_ms)
