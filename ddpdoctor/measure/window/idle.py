"""Gaps on a device's timeline: does it stand idle because its host is late, or has it work that the trace
lacks?

A gap before a kernel that was launched only after the gap had begun is the host's. One before a kernel that
was queued already is the device's own: it was busy with something that was not recorded (profilers drop
events under load), or waited for another stream. HolisticTraceAnalysis draws the same line between "host
wait" and the rest. What the device spends waiting for a collective to end is neither. Where a launch was not
recorded, it lies between those around it; of a gap that begins and ends between these nothing is known.

A host that waits for its device lets the device wait for it afterwards: which idle time follows from which call.

Issuing work is free as long as the host is ahead of its device. A call that waits (``.item()``, ``synchronize``, a
barrier, a copy from pageable memory) ends that: the queue is empty when it returns, and the device idles until
Python has prepared and launched the next work, kernel by kernel until the host is ahead again. Had the host not
waited, it would have been earlier by all that it has waited, and gaps up to that length would not be there. With
``lead`` the time by which the host, and ``saved`` the time by which the device would be earlier,

    lead  = lead + waited          where a call waits for a busy device
    saved = min(lead, saved + gap)  where the device idles until the host has launched

and the growth of ``saved`` in a gap is what the calls before it cost there. What is beyond is the host's own slowness:
over a step the device gains no more than the host waited in it, so that the step takes the longer of the host's own time
and of the device's. No host runs ahead by more than its launch queue holds, nor past a batch that its loader's workers
had not made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import EMPTY, Intervals, Ints, Mask, covered, total, union
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.trace import RankTrace, classify

from .collectives import Collectives
from .launches import CUDA_CALLS, DEVICE, launch_pairs, launches

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
    awaited = (launched <= ended + LAUNCH_SLACK_NS) | _host_waits(trace, ended)[0]
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


def _host_waits(trace: RankTrace, at: NDArray[Any]) -> tuple[Mask, Ints]:
    """(Whether the host is in a call that waits for the device at, or is released just before, each time; when the last such call that
    had begun was over.)"""
    calls = trace.name_mask(classify.is_sync_call) & trace.category_mask(*CUDA_CALLS)
    order = np.argsort(trace.start_ns[calls], kind="stable")
    index = np.searchsorted(trace.start_ns[calls][order], at, side="right")
    # Of calls of several threads, the one that ends last.
    release = np.maximum.accumulate(np.append(-_NEVER, trace.end_ns[calls][order]))[index]
    return (index > 0) & (release + LAUNCH_SLACK_NS >= at), release


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
    held, release = _host_waits(trace, idle[0])
    if not held.any():
        return EMPTY
    gaps, stops, release = idle[0][held], idle[1][held], release[held]
    calls = trace.category_mask(*CUDA_CALLS) & (trace.correlation >= 0)
    launches = np.sort(trace.start_ns[calls & ~trace.name_mask(classify.is_sync_call)])
    # Where the host launches nothing more, none of the gap.
    following = np.append(launches, -_NEVER)[np.searchsorted(launches, release)]
    until = np.minimum(np.maximum(following, gaps), np.maximum(release, gaps) + LAUNCH_SLACK_NS)
    return union(gaps, np.minimum(stops, until))


Times = NDArray[np.float64]

QUEUED_LAUNCHES = 1024
"""Launches that CUDA holds for a device before the host has to wait."""


class Tuning(msgspec.Struct, frozen=True):
    """What tells a wait from an ordinary call."""

    same_result_ns: int = 100_000
    """Computation between two calls that wait, or between a collective and the call that waits for its result: a mean, a
    stack, some microseconds each. More is a phase of the model."""
    empty_loader_ns: int = 2_000_000
    """Taking a batch that stands ready takes tenths of a millisecond; a host that is longer at it waits for the workers."""


TUNING = Tuning()

_RESULTS = (SyncKind.BARRIER, SyncKind.COLLECTIVE)
"""Collectives for whose results a host waits, the foremost first."""
_WAIT, _BATCH, _GAP = range(3)
WAITED_FOR = frozenset((SyncKind.DEVICE_SYNC, *_RESULTS))


class HostSyncs(msgspec.Struct, frozen=True):
    """The calls in which a host waited for its busy device, in order of their ends; times on the trace's own clock."""

    row: Ints = np.empty(0, np.int64)
    """[W] event in the trace."""
    end: Ints = np.empty(0, np.int64)
    """[W] ns"""
    waited_ns: Times = np.empty(0)
    """[W] ns of the call in which the device was busy."""
    kind: Sequence[SyncKind] = ()
    """[W] ``barrier``, ``collective`` (a result of one is waited for) or ``device_sync``; calls between which next to
    nothing is computed drain one queue together, and have the kind of the foremost."""
    queue_drain: Ints = np.empty(0, np.int64)
    """[W] number of that group of calls."""
    cost_ns: Times = np.empty(0)
    """[W] ns of idle time that follows from the call; of a group, each has its part by the time it waited."""


class DeviceTimeline(msgspec.Struct, frozen=True):
    """What a rank's device did, on the trace's own clock."""

    busy: Intervals
    """Computing, copying or communicating, checkpoints apart."""
    late: Intervals
    """Idle because the host had not launched, waits for data apart."""
    computes: Mask
    """[events] kernels that compute."""


class Batches(msgspec.Struct, frozen=True):
    """Batches taken from loaders with workers. One that is late comes no earlier to a host that is: what was gained since
    the batch before is lost."""

    end: Ints
    """[B] ns"""
    late: Mask
    """[B] whether the workers had not made it yet."""


def host_syncs_and_idle(
    trace: RankTrace, comms: Collectives, device: DeviceTimeline
) -> tuple[HostSyncs, dict[str, Intervals]]:
    """The calls that wait, and the parts of ``device.late`` that follow from each kind of them."""
    waits = _find_waits(trace, comms, device)
    if not len(waits.row) or not len(device.late[0]):
        return waits, {}
    starts, ends = device.late
    # What of the device's work a full launch queue holds.
    most_ns = QUEUED_LAUNCHES * total(device.busy) / max(int(trace.category_mask(*DEVICE).sum()), 1)
    saved, last = _saved(waits, device, _batches(trace), most_ns)
    cost = np.bincount(waits.queue_drain[last], saved, minlength=int(waits.queue_drain.max()) + 1)
    waited = np.bincount(waits.queue_drain, waits.waited_ns)
    waits = replace(waits, cost_ns=(cost / waited)[waits.queue_drain] * waits.waited_ns)
    kind = np.array(waits.kind)[last]
    idle = {
        name: union(starts[kind == name], np.minimum(starts + saved, ends)[kind == name])
        for name in WAITED_FOR
    }
    return waits, {name: intervals for name, intervals in idle.items() if len(intervals[0])}


def _saved(waits: HostSyncs, device: DeviceTimeline, batches: Batches, most_ns: float) -> tuple[Times, Ints]:
    """[gaps] ns that each gap in ``device.late`` would be shorter, and the last call that waited before its end (the
    first one where there is none)."""
    starts, ends = device.late
    events = sorted(
        [(int(at), _WAIT, i) for i, at in enumerate(waits.end)]
        + [(int(at), _BATCH, i) for i, at in enumerate(batches.end)]
        + [(int(at), _GAP, i) for i, at in enumerate(ends)]
    )
    gain, last = np.zeros(len(starts)), np.zeros(len(starts), np.int64)
    lead = saved = 0.0
    latest = gaps = since_batch = 0
    for _, what, i in events:
        if what == _WAIT:
            lead, latest = min(lead + float(waits.waited_ns[i]), saved + most_ns), i
        elif what == _GAP:
            gain[i], last[i] = min(lead - saved, float(ends[i] - starts[i])), latest
            saved, gaps = saved + gain[i], i + 1
        else:
            if batches.late[i]:
                saved -= float(gain[since_batch:gaps].sum())
                gain[since_batch:gaps], lead = 0.0, saved
            since_batch = gaps
    return gain, last


def _batches(trace: RankTrace) -> Batches:
    with_workers = trace.name_mask(lambda n: classify.IN_PROCESS not in n)
    rows = np.flatnonzero(classify.next_batches(trace) & with_workers)
    return Batches(trace.end_ns[rows], trace.duration_ns[rows] > TUNING.empty_loader_ns)


def _find_waits(trace: RankTrace, comms: Collectives, device: DeviceTimeline) -> HostSyncs:
    """The calls that wait for a busy device, in groups that drain one queue, by what they wait for."""
    launch, launched = launch_pairs(trace, device.computes)
    rows, waited = _waits_of_hosts(trace, launch, device.busy)
    if not len(rows):
        return HostSyncs()
    order = np.argsort(trace.end_ns[launch], kind="stable")
    at = trace.end_ns[launch][order]
    work = np.concatenate(([0], np.cumsum(trace.duration_ns[launched][order])))
    before = work[np.searchsorted(at, trace.start_ns[rows])]
    queue_drain = np.concatenate(([0], np.cumsum(np.diff(before) > TUNING.same_result_ns)))
    issued = work[np.searchsorted(at, comms.issued)]
    # Of each group, the foremost kind.
    places = np.full(int(queue_drain[-1]) + 1, len(_RESULTS))
    np.minimum.at(places, queue_drain, _results(comms, issued, trace.start_ns[rows], before))
    # A group that hardly waited has not drained the queue: that was empty.
    kept = np.flatnonzero(np.bincount(queue_drain, waited)[queue_drain] >= LAUNCH_SLACK_NS)
    if not len(kept):
        return HostSyncs()
    _, numbered = np.unique(queue_drain[kept], return_inverse=True)
    return HostSyncs(
        row=rows[kept],
        end=trace.end_ns[rows[kept]],
        waited_ns=waited[kept],
        kind=[(*_RESULTS, SyncKind.DEVICE_SYNC)[place] for place in places[queue_drain[kept]].tolist()],
        queue_drain=numbered.astype(np.int64),
        cost_ns=np.zeros(len(kept)),
    )


def _waits_of_hosts(trace: RankTrace, launch: Ints, busy: Intervals) -> tuple[Ints, Times]:
    """(calls that wait for the device, in order of their ends, ns of each in which it was busy), on threads that launch
    work. A copy that returns when it is done counts only where it waited for more than itself."""
    launching = np.isin(trace.lane, np.unique(trace.lane[launch]))
    calls = trace.category_mask(*CUDA_CALLS) & trace.name_mask(classify.is_sync_call) & launching
    # Calls of the runtime that return only when their own copy is done.
    copies, copied = launch_pairs(trace, trace.category_mask("gpu_memcpy"))
    copies = copies[trace.end_ns[copies] >= trace.end_ns[copied]]
    rows = np.unique(np.concatenate((np.flatnonzero(calls), copies[launching[copies]])))
    rows = rows[np.argsort(trace.end_ns[rows], kind="stable")]
    waited = covered(busy, trace.start_ns[rows], trace.end_ns[rows])
    keep = calls[rows] | (waited >= LAUNCH_SLACK_NS)
    return rows[keep], waited[keep]


def _results(comms: Collectives, issued: Ints, at: Ints, computed: Ints) -> Ints:
    """[W] place in ``_RESULTS`` of what calls at these times wait for: the result of a collective, where since its issue next
    to nothing was computed; behind them for any other. ``issued`` and ``computed`` are ns of computation launched before each
    collective and each call."""
    places = np.full(len(at), len(_RESULTS))
    for place in reversed(range(len(_RESULTS))):
        rows = np.flatnonzero(np.array(comms.kind) == _RESULTS[place])
        rows = rows[np.argsort(comms.issued[rows], kind="stable")]
        if len(rows):
            latest = np.searchsorted(comms.issued[rows], at, side="right") - 1
            since = computed - issued[rows[np.clip(latest, 0, None)]]
            places[(latest >= 0) & (since <= TUNING.same_result_ns)] = place
    return places
