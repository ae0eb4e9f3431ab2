"""What one rank's hook recorded, read with a bound and understood by itself.

In: a rank's ``steps.jsonl`` and ``samples.jsonl`` (:mod:`ddpdoctor.rundir`). Out: a frozen :class:`RankLog` of steps with
events, which also says where the rank synchronised, what its training thread did in between and which loaders feed it; the
synchronisations that all ranks have in common (:func:`match_syncs`); and which steps speak for the job
(:func:`chosen_and_why`). The idea: what one rank can say without knowing of any other is found once, and stays as it is.
"""

from .activities import Activities
from .devicetime import in_device_time
from .log import RankLog, first, no_samples, notes_on_records, usual_loader
from .matchedsyncs import MatchedSync, match_syncs
from .patterns import PatternKind, StepPattern, step_patterns, usual_lengths
from .reading import read_logs, read_rank_log, span_around
from .records import DeviceTimes, Event, Step
from .selection import (
    AROUND_WINDOW,
    DISTURBED,
    EVALUATION,
    OPENED,
    PAUSE,
    PROFILED,
    SUSPENDED,
    WARM_UP,
    WARM_UP_STEPS,
    chosen_and_why,
    evaluated,
    lengths_of_run,
    longest_ns,
    patterns_of_run,
    recorded_everywhere,
    settled_steps,
    undisturbed,
)
from .syncpoints import Key, SyncPoint
