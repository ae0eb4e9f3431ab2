"""A closer look than the step log's, now and then: the profiler window, and samples of the training thread's stack.

In come the ends of steps, and the news that the job builds a profiler of its own, to which ours gives way; out go a trace of a
few steps, the flight recorder's entries, and ``samples.jsonl``. The window opens and closes on the training thread, at step
numbers that all ranks share; saving it, and looking at stacks, is done by threads beside it.
"""

from .sampler import Sampler
from .stacks import Place, can_be_read, stack_of
from .trace_file import flight_recorder
from .window import Captures, Window, close_left_open, constructed, forget
