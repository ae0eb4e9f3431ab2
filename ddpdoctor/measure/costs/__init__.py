"""What each cause costs, and how much faster the job would be without it.

In: the graphs, the attribution, the source lines. Out: costs by the path of their fact. The idea: a cause costs what a replay
without it saves; who prices one knows nothing of the others.
"""

from .buckets import bucket_costs, disturbed_ns, exposed_ns, favoured_cap
from .epochstarts import with_evaluations
from .evaluations import lone_evaluation
from .pricing import Pricing, usual_transfer
from .rare import lost_share, merged, rare_costs
from .refine import refine
from .whatif import no_sync, what_if_facts

__all__ = [
    "Pricing",
    "bucket_costs",
    "disturbed_ns",
    "exposed_ns",
    "favoured_cap",
    "lone_evaluation",
    "lost_share",
    "merged",
    "no_sync",
    "rare_costs",
    "refine",
    "usual_transfer",
    "what_if_facts",
    "with_evaluations",
]
