"""The cost of each cause: how much shorter a step would be without it.

In: a :class:`Context`, the results of all earlier stages. Out: costs by the path of their fact. The cost of a cause is the time that a
replay without it saves. Each pricer (``Context`` → ``Costs``) handles its own causes. :func:`price_all` runs all :data:`PRICERS`, and
:func:`merge` combines two costs of one cause.

::

    late        late.*: work that takes longer on some ranks         why      the reason for a late rank's longer computation
    shared      shared.*: time that all ranks spend                  buckets  transfers and DDP's buckets
    rare        stalls in few steps, from the log of the whole run
    price       Context: one cost from one replay, with its range        merging  all pricers, one cost per cause
"""

from .buckets import Reduction, bucket_savings, disturbed_ns, favoured_cap_bytes, transfer_costs
from .late import arrival_facts, late_work, regularly_late
from .merging import costs_under, merge, price_all
from .price import Context, Costs, RareSource, ReducerCosts, add_cost, price_range
from .rare import epoch_starts, evaluations_on_some_ranks, lengthening_share, rare_costs, rare_pauses
from .shared import (
    redundant_reductions,
    shared_synchronisations,
    shared_work,
    starved_of_cpu,
    usual_transfer,
    without_reductions,
)
from .why import confirmed_by_events
