"""Turns the wrappers' events into one line per step.

Input: events, ends of steps and the user's marks, all on the training thread. Output: lines of ``steps.jsonl`` in the rank's
spool, which a thread copies to the run directory if no process of the launcher does. ``active`` holds whether this process
is recorded, and whether the current step is recorded in full. Recording in full costs tens of microseconds, so only some
of the short steps are. Collectives that are called or raise are written immediately, to survive a crash (``crash_records``).
``steps`` decides which optimizer step ends a training step. On a GPU, ``devices`` adds when the work ran there.
"""

from .active import active, backwards, starts
from .crash_records import (
    MOST_FRAMES_WRITTEN,
    MOST_PLACES,
    Call,
    Frame,
    exception_document,
    exception_recorder,
)
from .recorder import MOST_EVENTS, Recorder, recording_here
from .session import LAST_SETTINGS_STEP, Backward, Session
from .steps import IN_BACKWARD
from .thread_times import ThreadTimes
from .writer import Writer
