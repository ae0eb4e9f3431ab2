"""Single numbers from columns of telemetry, in which a reading may be missing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.steplog import WARM_UP_STEPS, RankLog
from ddpdoctor.measure.telemetry import Column

Span = tuple[int, int]
"""Begin and end by the wall clock of a host, epoch ns."""


def steps_span(logs: Sequence[RankLog]) -> Span | None:
    """Span of the steps after the warm-up in one host's logs; None without any."""
    spans = [step.recorded_ns for log in logs for step in log.steps[WARM_UP_STEPS:]]
    return (min(begin for begin, _ in spans), max(end for _, end in spans)) if spans else None


def during(column: Column, span: Span | None) -> Column:
    """The readings within ``span``; all where it is None."""
    times, values = column
    if span is None:
        return column
    inside = (times >= span[0]) & (times <= span[1])
    return times[inside], values[inside]


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
