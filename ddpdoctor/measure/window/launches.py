"""Find the host call that launched each device event."""

from __future__ import annotations

import numpy as np

from ddpdoctor.measure.numerics import Intervals, Ints, Mask, holds, union
from ddpdoctor.trace import CUDA_CALLS, RUNTIME_CALLS, RankTrace

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of device events."""


def host_recorded(trace: RankTrace) -> bool:
    """Return whether the trace records what the host did between its launches: operators, Python frames, or runtime calls that launch
    nothing, such as waits. Annotations only show the phase, and do not count."""
    if trace.category_mask("cpu_op", "python_function").any():
        return True
    calls = trace.category_mask(*RUNTIME_CALLS)
    launched = trace.correlation[trace.category_mask(*DEVICE)]
    return bool((calls & ~np.isin(trace.correlation, launched)).any())


def event_union(trace: RankTrace, mask: Mask) -> Intervals:
    """Return the union of the events in ``mask``."""
    rows = np.flatnonzero(mask)
    start = trace.start_ns[rows]
    return union(start, start + trace.duration_ns[rows])


def launches(trace: RankTrace, rows: Ints) -> Ints:
    """Return [M] row of the runtime call that launched each device event, else of the operator that did (by External id), else -1."""
    calls = np.flatnonzero(trace.category_mask(*RUNTIME_CALLS) & (trace.correlation >= 0))
    launched = rows_with_number(calls, trace.correlation[calls], trace.correlation[rows])
    if (launched < 0).any():
        operators = np.flatnonzero(trace.category_mask("cpu_op") & (trace.external_id >= 0))
        by_id = rows_with_number(operators, trace.external_id[operators], trace.external_id[rows])
        launched = np.where(launched < 0, by_id, launched)
    return launched


def launch_pairs(trace: RankTrace, device: Mask) -> tuple[Ints, Ints]:
    """Return pairs of rows: runtime calls, and the device events in ``device`` that they launched."""
    calls = np.flatnonzero(trace.category_mask(*CUDA_CALLS) & (trace.correlation >= 0))
    rows = np.flatnonzero(device & (trace.correlation >= 0))
    # Reversed, so that of several calls with one number the outer one, which begins first, is found.
    launched = rows_with_number(calls[::-1], trace.correlation[calls[::-1]], trace.correlation[rows])
    return launched[launched >= 0], rows[launched >= 0]


def launched_inside(trace: RankTrace, times: Intervals) -> Mask:
    """Return [events] whether each is a device event with a known launch at one of these times of the host."""
    inside = np.zeros(trace.size, bool)
    if len(times[0]):
        rows = np.flatnonzero(trace.category_mask(*DEVICE))
        calls = launches(trace, rows)
        inside[rows] = (calls >= 0) & holds(times, trace.start_ns[calls])
    return inside


def rows_with_number(rows: Ints, numbers: Ints, wanted: Ints) -> Ints:
    """Return [wanted] the last of ``rows`` with each wanted number; -1 if there is none."""
    if not len(rows):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(numbers, kind="stable")
    place = np.searchsorted(numbers[order], wanted, side="right") - 1
    nearest = order[np.maximum(place, 0)]
    same = (place >= 0) & (numbers[nearest] == wanted)
    result: Ints = np.where(same, rows[nearest], -1)
    return result
