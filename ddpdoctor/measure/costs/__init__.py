"""What each cause costs, and how much faster the job would be without it.

In: a :class:`Context`, which is all that the stages before have found out. Out: costs by the path of their fact. The idea: a
cause costs what a replay without it saves; each pricer (``Context`` → ``Costs``) knows its own causes and no other's, and
:func:`merge` is the one place where two prices of one cause meet.
"""

from __future__ import annotations

from collections.abc import Callable

from .buckets import (
    FAVOURED_CAP,
    BucketSavings,
    bucket_costs,
    bucket_savings,
    disturbed_ns,
    exposed_ns,
    favoured_cap,
)
from .context import Context, Costs, MessageCost, Price, RareSource, ReducerCosts
from .epochstarts import epoch_starts
from .evaluations import lone_evaluations
from .late import late_work
from .merge import late_facts, merge, number, shared_facts
from .rare import lost_share, rare_costs, rare_pauses
from .search import SEARCH, unused_parameter_search
from .shared import (
    exposed_transfers,
    redundant_reductions,
    shared_synchronisations,
    shared_work,
    starved_of_cpu,
    usual_transfer,
)
from .whatif import no_sync, what_if_facts

Pricer = Callable[[Context], Costs]

PRICERS: tuple[Pricer, ...] = (
    late_work,
    shared_work,
    epoch_starts,
    shared_synchronisations,
    exposed_transfers,
    redundant_reductions,
    starved_of_cpu,
    rare_pauses,
    lone_evaluations,
    bucket_costs,
    unused_parameter_search,
)
"""Who prices what. Where two price one cause, the larger price stands; of equal ones the first."""


def price_all(context: Context) -> Costs:
    """What all causes cost, each once."""
    return merge((pricer(context) for pricer in PRICERS), context.mean_step_ms)


__all__ = [
    "FAVOURED_CAP",
    "PRICERS",
    "SEARCH",
    "BucketSavings",
    "Context",
    "Costs",
    "MessageCost",
    "Price",
    "Pricer",
    "RareSource",
    "ReducerCosts",
    "bucket_savings",
    "disturbed_ns",
    "exposed_ns",
    "favoured_cap",
    "late_facts",
    "late_work",
    "lone_evaluations",
    "lost_share",
    "merge",
    "no_sync",
    "number",
    "price_all",
    "rare_costs",
    "shared_facts",
    "usual_transfer",
    "what_if_facts",
]
