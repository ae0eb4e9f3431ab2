"""One rank's profiler window, reduced to what the analysis needs.

In: the columns of one trace (:class:`ddpdoctor.trace.RankTrace`). Out: a :class:`Window`: its steps, its collectives, and
disjoint sets of intervals for what the device, or on a CPU the training thread, did in between. The idea: whatever kernels,
copies, launches and annotations say of why time went by is decided here, once, on the trace's own clock.
"""

from .collectives import launches
from .hostwaits import QUEUED_LAUNCHES, WAITED_FOR, launch_pairs
from .pauses import collecting
from .window import DEVICE, Window, arrivals, launched_inside, main_lane, read_window, rows_of

__all__ = [
    "DEVICE",
    "QUEUED_LAUNCHES",
    "WAITED_FOR",
    "Window",
    "arrivals",
    "collecting",
    "launch_pairs",
    "launched_inside",
    "launches",
    "main_lane",
    "read_window",
    "rows_of",
]
