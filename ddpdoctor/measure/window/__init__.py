"""One rank's profiler window, reduced to what the analysis needs.

In: the columns of one trace (:class:`ddpdoctor.trace.RankTrace`). Out: a :class:`Window` with steps, collectives, and disjoint interval
sets of the work of the device (on a CPU, of the training thread) in between. Only this package interprets kernels, copies, launches and
annotations, on the trace's own clock.
"""

from .collectives import ENGINE, ROUNDING_NS, Collectives
from .idle import QUEUED_LAUNCHES, WAITED_FOR
from .launches import CUDA_CALLS, DEVICE, RUNTIME_CALLS, event_union, launch_pairs, launched_inside, launches
from .reading import garbage_collections, main_lane, optimizer_updates, read_window
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
