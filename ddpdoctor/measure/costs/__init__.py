"""Price each cause: how much shorter a step would be without it.

In: a :class:`Context`, the results of all earlier stages. Out: costs by the path of their fact. A cause costs what a replay
without it saves. Each pricer (``Context`` → ``Costs``) handles its own causes; :func:`merge` combines two prices of one cause.
"""

from .buckets import Reduction, bucket_savings, disturbed_ns, favoured_cap_bytes
from .late import arrival_facts, late_work, regularly_late
from .price import Context, Costs, RareSource, ReducerCosts, price_range
from .pricing import costs_under, merge, price_all
from .rare import lengthening_share, rare_costs
from .shared import usual_transfer, without_reductions
from .why import confirmed_by_events
