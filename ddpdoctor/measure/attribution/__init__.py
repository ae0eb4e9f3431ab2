"""Who is late, with what, in which steps.

In: a graph. Out: an :class:`Excess`: how much more each rank did of each kind of work than the others, where that stands out
of scatter. The idea: a rank is accused for what it did since the ranks were last together, never for time inside a collective,
and never for what hits everybody alike.
"""

from .excess import FEWEST_SPIKES, SPIKE_SHARE, SPIKE_SIGMAS, Excess, component, excess, unseen
from .standout import WINDOW_SHARE

__all__ = [
    "FEWEST_SPIKES",
    "SPIKE_SHARE",
    "SPIKE_SIGMAS",
    "WINDOW_SHARE",
    "Excess",
    "component",
    "excess",
    "unseen",
]
