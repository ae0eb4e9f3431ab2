"""From what the wrappers saw to one line a step.

In come events, the ends of steps and the user's own marks, all on the training thread; out go lines of ``steps.jsonl`` in the
rank's spool, and, by a thread beside it, the spool's way to the run directory. ``active`` says whether this process is recorded,
and the step in progress in full: recording a step costs it tens of microseconds, so of short steps only some are (``thinning``).
What must outlive the process is written as it happens: the collectives that are called (``calls``), and those that raise (``failures``).
Which optimizer step ends a training step is ``boundary``'s to say; on a GPU ``devices`` adds when the work ran there.
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
from .recorder import Recorder, ThreadTimes, recording_here
from .session import LAST_SETTINGS_STEP, Session
from .steps import IN_BACKWARD
from .writer import Writer
