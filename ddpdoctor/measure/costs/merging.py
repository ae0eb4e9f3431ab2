"""Runs all pricers, and merges their costs to one cost per cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from ddpdoctor.measure.attribution import attribute
from ddpdoctor.measure.facts import scaled
from ddpdoctor.measure.metrics import host_idle_ns
from ddpdoctor.measure.taxonomy import LATE_COMPONENTS, STALLS, LateCause

from .buckets import transfer_costs
from .late import late_work
from .price import Context, Costs, add_cost
from .rare import epoch_starts, evaluations_on_some_ranks, rare_pauses
from .shared import redundant_reductions, shared_synchronisations, shared_work, starved_of_cpu

Pricer = Callable[[Context], Costs]

_STALLS = tuple(f"{group}.{cause}" for group in ("late", "shared") for cause in STALLS)


def _stalls_of_run(context: Context) -> Costs:
    """Costs of stalls of the hosts, from device time of the whole run. A window of a few steps does not show how often they occur: W
    workers that are too slow deliver W batches at once, and then none for as long as a batch takes."""
    run = context.device_run
    if run is None:
        return {}
    whole = replace(
        context,
        graph=run.graph,
        attribution=attribute(run.graph),
        lines=run.lines,
        log_graph=None,
        profiler_ns=0.0,
    )
    costs = {**late_work(whole), **shared_work(whole)}
    return {path: costs[path] for path in _STALLS if path in costs}


PRICERS: tuple[Pricer, ...] = (
    late_work,
    shared_work,
    epoch_starts,
    shared_synchronisations,
    redundant_reductions,
    starved_of_cpu,
    transfer_costs,
)
"""Pricers that replay the primary graph; they run if it has cycles. If two of them find a cost of one cause, the larger one is used; of
equal ones the first."""
PRICERS_OF_RECORDINGS: tuple[Pricer, ...] = (rare_pauses, evaluations_on_some_ranks, _stalls_of_run)
"""Pricers that use the recordings themselves; they always run, after :data:`PRICERS`."""
_OF_HOSTS = ("late.host", "shared.device_sync", "shared.host", "shared.launch", "shared.outside")
"""Paths of costs of a device's waiting for its host."""
_TOTAL = f"late.{LateCause.TOTAL}"
_WORK = frozenset(f"late.{cause}" for cause in LATE_COMPONENTS)
"""Causes with components of their own. Others describe the same time (uneven work is computation) or excluded steps (evaluations),
and add nothing to the total lateness."""
_COMPUTING = tuple(
    f"late.{cause}"
    for cause in (LateCause.COMPUTE, LateCause.UNEVEN, LateCause.THROTTLED, LateCause.CPU_STARVED)
)
"""``late.compute`` and its more specific names; a pricer uses one of them."""


_NOT_LIMITED = (
    *("late.cpu_starved", "late.data", "late.evaluation", "late.total"),
    *("shared.cpu_starved", "shared.data", "shared.data_epoch_start"),
)
"""Paths of costs without which the workers of a loader would prepare more batches, or that are not of the measured steps."""


def _limited_by_workers(costs: Costs, context: Context) -> Costs:
    """The costs, with those of other causes limited by the workers of a loader: no step can be shorter than its batches take to prepare.
    If a step becomes shorter otherwise, it waits longer for them."""
    step_ms = context.mean_step_ms
    if not step_ms or not context.loader_limit_ms:
        return costs
    most_ms = max(step_ms - context.loader_limit_ms, 0.0)
    return {
        path: cost
        if path in _NOT_LIMITED or cost.ms_per_step <= most_ms
        else scaled(cost, most_ms / cost.ms_per_step, step_ms)
        for path, cost in costs.items()
    }


def _of_window(costs: Costs, context: Context) -> Costs:
    """The costs of the primary graph; without those that the whole run shows, if there is device time."""
    costs = _without_profiler(costs, context)
    if context.device_run is None:
        return costs
    total = costs.get(_TOTAL)
    kept = {path: cost for path, cost in costs.items() if path not in _STALLS}
    if total is not None:
        rest_ms = total.ms_per_step - sum(
            costs[path].ms_per_step for path in _WORK & costs.keys() - kept.keys()
        )
        if rest_ms <= 0.0:
            del kept[_TOTAL]
        else:
            kept[_TOTAL] = scaled(total, rest_ms / total.ms_per_step, total.ms_per_step / total.share)
    return kept


def _without_profiler(costs: Costs, context: Context) -> Costs:
    """The costs of a window, scaled to a step without profiler: devices wait less for hosts, and all else takes as long."""
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
        priced.append(_of_window(costs, context) if pricer in PRICERS else costs)
    return _limited_by_workers(merge(priced, context.mean_step_ms), context)


def merge(priced: Iterable[Costs], mean_ms: float | None) -> Costs:
    """One cost per cause: the largest that a pricer found. The log of a whole run shows rare events that a window misses.

    ``late.total`` is increased by what the merged costs add to it. ``mean_ms`` is the mean step.
    """
    merged: Costs = {}
    summed: Costs = {}
    for costs in priced:
        for path, price in costs.items():
            if path not in merged or price.ms_per_step > merged[path].ms_per_step:
                merged[path] = price
                summed = costs if path == _TOTAL else summed
    for path in sorted(_WORK & merged.keys()):
        price, total = merged[path], merged.get(_TOTAL)
        names = _COMPUTING if path == _COMPUTING[0] else (path,)
        more_ms = price.ms_per_step - sum(summed[name].ms_per_step for name in names if name in summed)
        if more_ms > 0:
            if total is not None:
                whole_ms = total.ms_per_step + more_ms
                merged[_TOTAL] = add_cost(total, price, whole_ms, mean_ms or whole_ms)
            else:
                merged[_TOTAL] = replace(price, ranks=None)
    return merged


def costs_under(group: str, costs: Costs) -> Costs:
    """Costs of one group of facts, ``late`` or ``shared``, by their names in it."""
    prefix = f"{group}."
    return {path.removeprefix(prefix): price for path, price in costs.items() if path.startswith(prefix)}
