"""One rank's profiler window, reduced to what the analysis needs.

In: the columns of one trace (:class:`ddpdoctor.trace.RankTrace`). Out: a :class:`Window`: its steps, its collectives, and disjoint sets
of intervals for what the device, or on a CPU the training thread, did in between. Kernels, copies, launches and annotations are
interpreted here, once, on the trace's own clock.
"""

from .collectives import ENGINE, ROUNDING_NS, Collectives
from .idle import QUEUED_LAUNCHES, WAITED_FOR
from .launches import CUDA_CALLS, DEVICE, RUNTIME_CALLS, event_union, launch_pairs, launched_inside, launches
from .reading import garbage_collections, main_lane, read_window
from .window import (
    QUEUED_NS,
    UNKNOWN_STEP,
    Window,
    arrivals,
    in_steps,
    step_of,
    step_of_collectives,
    with_bucket_sizes,
)
