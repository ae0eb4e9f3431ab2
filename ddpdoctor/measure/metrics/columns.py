"""Single numbers from columns of telemetry, in which a reading may be missing."""

from __future__ import annotations

import numpy as np

from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.telemetry import Column


def readings(column: Column) -> Array:
    """The values that were read."""
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
