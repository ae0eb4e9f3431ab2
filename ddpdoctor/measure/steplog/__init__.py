"""Reads each rank's step log, with a limit on its size.

In: a rank's ``steps.jsonl`` and ``samples.jsonl`` (:mod:`ddpdoctor.rundir`). Out: a frozen :class:`RankLog` of steps with
their events, and what one log alone shows: the rank's synchronisations, the activities of its training thread, its loaders.
Also the synchronisations that all ranks share (:func:`match_syncs`) and the steps to measure (:func:`select_steps`).
"""

from .absences import notes_on_records
from .devicetime import in_device_time
from .log import Activities, RankLog, first, no_samples
from .patterns import (
    PatternKind,
    StepPattern,
    long_steps,
    pause_steps,
    step_patterns,
    usual_lengths,
    without_run_ahead,
)
from .reading import read_logs, read_rank_log, span_around
from .records import DeviceTimes, Event, Step, WorkerLog, WorkerSample
from .selection import (
    AROUND_WINDOW,
    DISTURBED,
    EVALUATION,
    OPENED,
    PROFILED,
    SUSPENDED,
    WARM_UP,
    WARM_UP_STEPS,
    comparable_steps,
    disturbed,
    evaluated,
    lengths_of_run,
    longest_ns,
    recorded_everywhere,
    select_steps,
    settled_steps,
    undisturbed,
)
from .syncpoints import Key, MatchedSync, SyncPoint, match_syncs
from .trainings import Training, trainings_of
