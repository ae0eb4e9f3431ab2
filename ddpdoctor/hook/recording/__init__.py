"""Turns the wrappers' events into one line per step.

Input: events, ends of steps and the user's own marks, all on the training thread. Output: lines of ``steps.jsonl`` in
the rank's spool, which a thread copies to the run directory if no launcher's process does. ``active`` says whether this
process is recorded, and whether the current step is recorded in full: that costs tens of microseconds, so of short
steps only some are. What must survive a crash is written as it happens: collectives that are called and those that
raise (``crash_records``). ``steps`` decides which optimizer step ends a training step; on a GPU ``devices`` adds when
the work ran there.
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
from .session import LAST_SETTINGS_STEP, Session
from .steps import IN_BACKWARD
from .thread_times import ThreadTimes
from .writer import Writer
