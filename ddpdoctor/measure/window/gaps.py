"""Gaps on a device's timeline: does it stand idle because its host is late, or has it work that the trace
lacks?

A gap before a kernel that was launched only after the gap had begun is the host's. One before a kernel that
was queued already is the device's own: it was busy with something that was not recorded (profilers drop
events under load), or waited for another stream. HolisticTraceAnalysis draws the same line between "host
wait" and the rest. What the device spends waiting for a collective to end is neither.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import EMPTY, Intervals, union
from ddpdoctor.trace import RankTrace, classify

LAUNCH_SLACK_NS = 30_000
"""A launch reaches an idle device, and a host is woken from waiting for one, within this time."""
_SHORT_NS = 10_000
"""A gap of this length between queued kernels is what one kernel after the other costs (about 1 us), and fewer
kernels save it, as they save launching."""
_NEVER = np.iinfo(np.int64).max // 2


def device_gaps(
    trace: RankTrace, own: NDArray[np.bool_], comm_end: NDArray[np.int64]
) -> tuple[Intervals, Intervals, Intervals]:
    """(for the host, by the device, between queued kernels): gaps between the device events in ``own``, beside
    collectives too. The third are among the first: what one kernel after the other costs.

    ``comm_end`` are the ends of the rank's collectives. A gap in which one ends counts from there if it was waited
    for: by the device, whose next work was launched already, or by the host in a call that waits.
    """
    rows = np.flatnonzero(own)
    if len(rows) < 2:
        return EMPTY, EMPTY, EMPTY
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    busy_start, busy_end = union(trace.start_ns[rows], trace.end_ns[rows])
    starts, stops = busy_end[:-1].astype(np.int64), busy_start[1:].astype(np.int64)
    launched = _launched(trace, rows)[np.searchsorted(trace.start_ns[rows], stops)]
    ends = np.concatenate(([-_NEVER], np.sort(comm_end)))
    ended = ends[np.searchsorted(ends, stops, side="right") - 1]
    awaited = (launched <= ended + LAUNCH_SLACK_NS) | _host_waits(trace, ended)
    since = np.where((ended > starts) & awaited, ended, starts)
    until = np.clip(launched + LAUNCH_SLACK_NS, since, stops)
    until = np.where(launched <= since, since, until)
    short = stops - since <= _SHORT_NS
    queued = short & (until == since)
    until = np.where(short, stops, until)
    return union(since, until), union(until, stops), union(since[queued], stops[queued])


def _host_waits(trace: RankTrace, at: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether the host is in a call that waits for the device at (or is released just before) each time."""
    start, end = _waiting_calls(trace)
    if not len(start):
        return np.zeros(len(at), bool)
    index = np.searchsorted(start, at, side="right") - 1
    waits: NDArray[np.bool_] = (index >= 0) & (end[np.clip(index, 0, None)] + LAUNCH_SLACK_NS >= at)
    return waits


def _waiting_calls(trace: RankTrace) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts in order, and the latest end of any such call up to each."""
    calls = trace.name_mask(classify.is_sync_call) & trace.category_mask("cuda_runtime", "cuda_driver")
    order = np.argsort(trace.start_ns[calls])
    return trace.start_ns[calls][order], np.maximum.accumulate(trace.end_ns[calls][order])


def _launched(trace: RankTrace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """[M] when the host had launched each device event (rows in order of start); where its call was not
    recorded, when it had launched the next one that is known."""
    calls = trace.category_mask("cuda_runtime", "cuda_driver", "xpu_runtime") & (trace.correlation >= 0)
    by_correlation = dict(zip(trace.correlation[calls].tolist(), trace.end_ns[calls].tolist(), strict=True))
    launched = np.array([by_correlation.get(int(c), _NEVER) for c in trace.correlation[rows]], np.int64)
    filled: NDArray[np.int64] = np.minimum.accumulate(launched[::-1])[::-1]
    return filled


def after_sync(trace: RankTrace, idle: Intervals) -> Intervals:
    """Idle gaps that begin while the host waits for the device: the host let the queue run dry, up to its
    first launch after."""
    start, end = _waiting_calls(trace)
    if not len(start) or not len(idle[0]):
        return EMPTY
    gaps, stops = idle
    index = np.searchsorted(start, gaps, side="right") - 1
    held = (index >= 0) & (end[np.clip(index, 0, None)] + LAUNCH_SLACK_NS >= gaps)
    launches = np.sort(
        trace.start_ns[
            trace.category_mask("cuda_runtime", "cuda_driver")
            & (trace.correlation >= 0)
            & ~trace.name_mask(classify.is_sync_call)
        ]
    )
    # The gap up to the first call after the host was released; what comes later is the host's own work, or
    # launching.
    first = np.searchsorted(launches, end[np.clip(index, 0, None)])
    known = held & (first < len(launches))
    until = np.where(known, launches[np.clip(first, 0, len(launches) - 1)] if len(launches) else stops, gaps)
    released = np.minimum(np.maximum(end[np.clip(index, 0, None)], gaps) + LAUNCH_SLACK_NS, stops)
    return union(gaps[held], np.minimum(stops, np.minimum(np.maximum(until, gaps), released))[held])
