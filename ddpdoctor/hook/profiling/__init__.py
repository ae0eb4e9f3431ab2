"""Detailed data of part of the run: the profiler window, and samples of the training thread's stack.

Input: the ends of steps, and whether the job constructs its own profiler, which takes precedence. Output: a trace of a few
steps, the flight recorder's entries, and ``samples.jsonl``. The window opens and closes on the training thread, at the same
step numbers on all ranks. Other threads save its trace and sample stacks. ``workers`` samples data loader workers in
their own processes.
"""

from .sampler import Place, Sampler, can_be_read, stack_of
from .trace_file import flight_recorder
from .window import (
    Captures,
    Window,
    close_left_open,
    forget_windows,
    leave_parents_windows,
    note_user_profiler,
)
from .workers import WorkerRecorder
