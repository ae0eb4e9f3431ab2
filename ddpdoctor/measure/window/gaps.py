"""Gaps on a device's timeline: does it stand idle because its host is late, or has it work that the trace
lacks?

A gap before a kernel that was launched only after the gap had begun is the host's. One before a kernel that
was queued already is the device's own: it was busy with something that was not recorded (profilers drop
events under load), or waited for another stream. HolisticTraceAnalysis draws the same line between "host
wait" and the rest. What the device spends waiting for a collective to end is neither. Where a launch was not
recorded, it lies between those around it; of a gap that begins and ends between these nothing is known.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import EMPTY, Intervals, Ints, union
from ddpdoctor.trace import RankTrace, classify

from .launches import CUDA_CALLS, launches

LAUNCH_SLACK_NS = 30_000
"""A launch reaches an idle device, and a host is woken from waiting for one, within this time: both take some 5 to 20
microseconds by CUDA's own timelines."""
_SHORT_NS = 10_000
"""A gap of this length between queued kernels is what one kernel after the other costs (about 1 us), and fewer
kernels save it, as they save launching."""
_NEVER = np.iinfo(np.int64).max // 2
"""ns: after all that was recorded, negative before it; half, so that sums do not overflow."""


class DeviceGaps(msgspec.Struct, frozen=True):
    """Gaps between a device's own events, beside collectives too."""

    for_host: Intervals
    """The host had not launched the next."""
    by_device: Intervals
    """The next was launched already."""
    queued: Intervals
    """Of the first, those between queued kernels: what one kernel after the other costs."""


def device_gaps(trace: RankTrace, own: NDArray[np.bool_], comm_end: NDArray[np.int64]) -> DeviceGaps:
    """The gaps between the device events in ``own``.

    ``comm_end`` are the ends of the rank's collectives. A gap in which one ends counts from there if it was waited
    for: by the device, whose next work was launched already, or by the host in a call that waits.
    """
    rows = np.flatnonzero(own)
    if len(rows) < 2:
        return DeviceGaps(EMPTY, EMPTY, EMPTY)
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    busy_start, busy_end = union(trace.start_ns[rows], trace.end_ns[rows])
    starts, stops = busy_end[:-1].astype(np.int64), busy_start[1:].astype(np.int64)
    following = np.searchsorted(trace.start_ns[rows], stops)
    not_before, launched = (times[following] for times in _launched(trace, rows))
    ends = np.concatenate(([-_NEVER], np.sort(comm_end)))
    ended = ends[np.searchsorted(ends, stops, side="right") - 1]
    awaited = (launched <= ended + LAUNCH_SLACK_NS) | _host_waits(trace, ended)
    since = np.where((ended > starts) & awaited, ended, starts)
    reached = np.where(launched <= since, since, np.clip(launched + LAUNCH_SLACK_NS, since, stops))
    short = stops - since <= _SHORT_NS
    queued = short & (reached == since)
    until = np.where(short, stops, reached)
    surely = np.where(not_before == launched, until, np.clip(not_before, since, until))
    return DeviceGaps(
        for_host=union(since, surely),
        by_device=union(until, stops),
        queued=union(since[queued], stops[queued]),
    )


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
    calls = trace.name_mask(classify.is_sync_call) & trace.category_mask(*CUDA_CALLS)
    order = np.argsort(trace.start_ns[calls])
    return trace.start_ns[calls][order], np.maximum.accumulate(trace.end_ns[calls][order])


def _launched(trace: RankTrace, rows: Ints) -> tuple[Ints, Ints]:
    """([M], [M]) when the host had launched each device event (rows in order of start) at the earliest and at the latest:
    where neither its call nor its operator was recorded, between those before and behind it that are known."""
    calls = launches(trace, rows)
    known = calls >= 0
    # An operator goes on behind the launch, a copy's until the copy is done.
    at = np.minimum(trace.end_ns[np.clip(calls, 0, None)], trace.start_ns[rows])
    latest: Ints = np.minimum.accumulate(np.where(known, at, _NEVER)[::-1])[::-1]
    before = np.maximum.accumulate(np.where(known, at, -_NEVER))
    return np.where(known, at, np.minimum(before, latest)), np.where(known, at, latest)


def after_sync(trace: RankTrace, idle: Intervals) -> Intervals:
    """Idle gaps that begin while the host waits for the device: the host let the queue run dry.

    Of such a gap, the part up to the first call after the host was released; what comes later is the host's own work, or
    launching.
    """
    start, end = _waiting_calls(trace)
    if not len(start) or not len(idle[0]):
        return EMPTY
    gaps, stops = idle
    index = np.searchsorted(start, gaps, side="right") - 1
    release = end[np.clip(index, 0, None)]
    held = (index >= 0) & (release + LAUNCH_SLACK_NS >= gaps)
    until = np.maximum(_first_launch(trace, release, gaps, held), gaps)
    released = np.minimum(np.maximum(release, gaps) + LAUNCH_SLACK_NS, stops)
    return union(gaps[held], np.minimum(stops, np.minimum(until, released))[held])


def _first_launch(
    trace: RankTrace, release: NDArray[np.int64], otherwise: NDArray[Any], asked: NDArray[np.bool_]
) -> NDArray[Any]:
    """When the host launches first after each ``release``; ``otherwise`` where it does not, or is not ``asked`` for."""
    calls = trace.category_mask(*CUDA_CALLS) & (trace.correlation >= 0)
    launches = np.sort(trace.start_ns[calls & ~trace.name_mask(classify.is_sync_call)])
    if not len(launches):
        return otherwise
    first = np.searchsorted(launches, release)
    known = asked & (first < len(launches))
    return np.where(known, launches[np.clip(first, 0, len(launches) - 1)], otherwise)
