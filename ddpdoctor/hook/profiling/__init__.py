"""Detailed data, now and then: the profiler window, and samples of the training thread's stack.

Input: the ends of steps, and whether the job constructs a profiler of its own, which has precedence. Output: a trace of
a few steps, the flight recorder's entries, and ``samples.jsonl``. The window opens and closes on the training thread,
at step numbers that all ranks share; other threads save it and sample stacks. ``workers`` samples in the processes of data
loader workers.
"""

from .sampler import Place, Sampler, can_be_read, stack_of
from .trace_file import flight_recorder
from .window import Captures, Window, close_left_open, constructed, forget_windows
from .workers import WorkerRecorder
