"""What each cause costs, and how much faster the job would be without it.

In: a :class:`Context`, which is all that the stages before have found out. Out: costs by the path of their fact. The idea: a
cause costs what a replay without it saves; each pricer (``Context`` → ``Costs``) knows its own causes and no other's, and
:func:`merge` is the one place where two prices of one cause meet.
"""

from __future__ import annotations

from collections.abc import Callable

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
from .late import arrival_facts, late_work
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
"""Who prices what by replays of the graph that speaks; asked where it has cycles. Where two price one cause, the larger price
stands; of equal ones the first."""
PRICERS_OF_RECORDINGS: tuple[Pricer, ...] = (rare_pauses, evaluations_on_some_ranks)
"""Who prices by the recordings themselves; asked in any case, after those."""


def price_all(context: Context, progress: Callable[[int, int], None] | None = None) -> Costs:
    """What all causes cost, each once; ``progress(done, total)`` is called before each pricer is asked."""
    pricers = [*(PRICERS if context.graph.groups else ()), *PRICERS_OF_RECORDINGS]
    priced = []
    for done, pricer in enumerate(pricers):
        if progress is not None:
            progress(done, len(pricers))
        priced.append(pricer(context))
    return merge(priced, context.mean_step_ms)
