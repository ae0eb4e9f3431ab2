"""Single numbers from columns of telemetry, in which a reading may be missing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpdoctor.measure.numerics import Array, Intervals, Ints, Mask, holds, subtract, union
from ddpdoctor.measure.steplog import WARM_UP_STEPS, RankLog, disturbed
from ddpdoctor.measure.telemetry import Column


def steps_time(logs: Sequence[RankLog]) -> Intervals | None:
    """When the steps after the warm-up ran in one host's logs, without those in which a profiler was opened, closed or saved, for a second
    or more; by the wall clock of the host, epoch ns. None without any."""
    steps = [step for log in logs for step in log.steps[WARM_UP_STEPS:]]
    if not steps:
        return None
    begins, ends = np.array([step.recorded_ns for step in steps], np.int64).T
    kept = np.array([not disturbed(step) for step in steps])
    # A reading at the end of the last step is of that step.
    whole = union([begins.min()], [ends.max() + 1])
    return subtract(whole, union(begins[~kept], ends[~kept])) if kept.any() else whole


def during(column: Column, time: Intervals | None) -> Column:
    """The readings within ``time``; all where it is None."""
    times, values = column
    inside = within(times, time)
    return times[inside], values[inside]


def within(times: Ints, time: Intervals | None) -> Mask:
    """Mask of the ``times`` within ``time``; all where it is None."""
    return np.ones(len(times), bool) if time is None else holds(time, times)


def readings(column: Column) -> Array:
    """The values without missing readings."""
    values: Array = column[1][~np.isnan(column[1])]
    return values


def mean(column: Column) -> float | None:
    """None where nothing was read."""
    values = readings(column)
    return float(values.mean()) if len(values) else None


def most(column: Column) -> float | None:
    """None where nothing was read."""
    values = readings(column)
    return float(values.max()) if len(values) else None
