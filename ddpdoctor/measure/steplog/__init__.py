"""What one rank's hook recorded, read with a bound and understood by itself.

In: a rank's ``steps.jsonl`` and ``samples.jsonl`` (:mod:`ddpdoctor.rundir`). Out: a :class:`RankLog` of steps with
events, the points where the rank synchronised (:func:`rank_points`), what its training thread did in between
(:class:`Activities`), and which steps speak for the job (:func:`chosen_and_why`). The idea: everything that one rank can
say without knowing of any other.
"""

from .activities import Activities
from .devicetime import in_device_time
from .loaders import first, loaders_with_workers, main_loader_settings
from .log import DeviceTimes, Event, RankLog, Sample, Step, read_logs, read_rank_log, samples_by_step
from .notes import notes_on_records
from .selection import (
    AROUND_WINDOW,
    OPENED,
    PROFILED,
    SUSPENDED,
    WARM_UP_STEPS,
    choose_steps,
    chosen_and_why,
    evaluates,
    longest_ns,
    main_loaders,
    recorded_everywhere,
    undisturbed,
)
from .syncpoints import Key, Meeting, Point, gradients_ready, match, rank_points

__all__ = [
    "AROUND_WINDOW",
    "OPENED",
    "PROFILED",
    "SUSPENDED",
    "WARM_UP_STEPS",
    "Activities",
    "DeviceTimes",
    "Event",
    "Key",
    "Meeting",
    "Point",
    "RankLog",
    "Sample",
    "Step",
    "choose_steps",
    "chosen_and_why",
    "evaluates",
    "first",
    "gradients_ready",
    "in_device_time",
    "loaders_with_workers",
    "longest_ns",
    "main_loader_settings",
    "main_loaders",
    "match",
    "notes_on_records",
    "rank_points",
    "read_logs",
    "read_rank_log",
    "recorded_everywhere",
    "samples_by_step",
    "undisturbed",
]
