"""Classify gaps on a device's timeline, and find the idle time that host synchronisations cause.

If the kernel after a gap was launched only after the gap had begun, the gap is due to the host. If the kernel was already queued, the gap
is due to the device: it did work that was not recorded (profilers drop events under load), or waited for another stream.
HolisticTraceAnalysis distinguishes "host wait" from other gaps in the same way. Time in which the device waits for a collective to end is
neither. An unrecorded launch is between the known launches before and after it; the cause of a gap between these two is unknown.

Launching costs nothing as long as the host is ahead of its device. A call that waits (``.item()``, ``synchronize``, a barrier, a copy
from pageable memory) ends that: the launch queue is empty when it returns, and the device is idle until Python has prepared and launched
the next work, kernel by kernel until the host is ahead again. Without the wait, the host would have been earlier by the time it waited,
and gaps up to that length would not exist. With ``lead`` the time by which the host would be earlier, and ``saved`` that for the device,

    lead  = lead + waited           when a call waits for a busy device
    saved = min(lead, saved + gap)  when the device is idle until the host has launched

The increase of ``saved`` in a gap is the part of the gap that earlier calls cause. The rest is due to the host's own slowness: over a step
the device gains at most the time that the host waited, so that the step takes the longer of the host's own time and the device's time. A
host cannot run ahead by more than its launch queue contains, nor beyond a batch that its loader's workers had not prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import EMPTY, Array, Intervals, Ints, Mask, covered, total, union
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.trace import RankTrace, classify

from .collectives import Collectives
from .launches import CUDA_CALLS, DEVICE, launch_pairs, launches

LAUNCH_SLACK_NS = 30_000
"""Longest time from a launch to its start on an idle device, and from the device's end to the host's return. Both take 5 to 20 us
in CUDA's timelines."""
_SHORT_NS = 10_000
"""Longest gap between queued kernels that is the normal cost of consecutive kernels (about 1 us). Like launching, it decreases with the
number of kernels."""
_NEVER = np.iinfo(np.int64).max // 2
"""ns after all recorded times (negated: before them); half the maximum, so that sums do not overflow."""


class DeviceGaps(msgspec.Struct, frozen=True):
    """Gaps between a device's own events, including those during collectives."""

    for_host: Intervals
    """Gaps in which the host had not yet launched the next event."""
    by_device: Intervals
    """Gaps in which the next event was already launched."""
    queued: Intervals
    """The part of ``for_host`` between queued kernels, the normal cost of consecutive kernels."""


def device_gaps(trace: RankTrace, own: NDArray[np.bool_], comm_end: NDArray[np.int64]) -> DeviceGaps:
    """Return the gaps between the device events in ``own``.

    ``comm_end`` are the ends of the rank's collectives. If a collective ends in a gap, the gap counts from there if the device waited
    for it (the next event was already launched) or the host did (in a call that waits).
    """
    rows = np.flatnonzero(own)
    if len(rows) < 2:
        return DeviceGaps(EMPTY, EMPTY, EMPTY)
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    busy_start, busy_end = union(trace.start_ns[rows], trace.end_ns[rows])
    starts, stops = busy_end[:-1].astype(np.int64), busy_start[1:].astype(np.int64)
    following = np.searchsorted(trace.start_ns[rows], stops)
    not_before, launched = (times[following] for times in _launch_limits(trace, rows))
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
    """Whether at each time the host is in a call that waits for the device, or has just returned from one; and the latest end of the calls
    that had begun."""
    calls = trace.name_mask(classify.is_sync_call) & trace.category_mask(*CUDA_CALLS)
    order = np.argsort(trace.start_ns[calls], kind="stable")
    index = np.searchsorted(trace.start_ns[calls][order], at, side="right")
    # Calls may be of several threads: take the latest end.
    release = np.maximum.accumulate(np.append(-_NEVER, trace.end_ns[calls][order]))[index]
    return (index > 0) & (release + LAUNCH_SLACK_NS >= at), release


def _launch_limits(trace: RankTrace, rows: Ints) -> tuple[Ints, Ints]:
    """([M], [M]) earliest and latest time at which the host launched each device event (rows in order of start). They differ if neither its
    call nor its operator was recorded; then the known launches before and after it are the limits."""
    calls = launches(trace, rows)
    known = calls >= 0
    # An operator ends after its launch; that of a copy, when the copy is done.
    at = np.minimum(trace.end_ns[np.clip(calls, 0, None)], trace.start_ns[rows])
    latest: Ints = np.minimum.accumulate(np.where(known, at, _NEVER)[::-1])[::-1]
    before = np.maximum.accumulate(np.where(known, at, -_NEVER))
    return np.where(known, at, np.minimum(before, latest)), np.where(known, at, latest)


def after_sync(trace: RankTrace, idle: Intervals) -> Intervals:
    """Return the idle gaps that begin while the host waits for the device, so that the launch queue is empty.

    Only the part of a gap up to the first launch after the host returned; the rest is the host's own work, or launching.
    """
    in_call, release = _host_waits(trace, idle[0])
    if not in_call.any():
        return EMPTY
    gaps, stops, release = idle[0][in_call], idle[1][in_call], release[in_call]
    calls = trace.category_mask(*CUDA_CALLS) & (trace.correlation >= 0)
    launches = np.sort(trace.start_ns[calls & ~trace.name_mask(classify.is_sync_call)])
    # If the host launches nothing more, the gap does not count.
    following = np.append(launches, -_NEVER)[np.searchsorted(launches, release)]
    until = np.minimum(np.maximum(following, gaps), np.maximum(release, gaps) + LAUNCH_SLACK_NS)
    return union(gaps, np.minimum(stops, until))


QUEUED_LAUNCHES = 1024
"""Number of launches that CUDA queues for a device before the host has to wait."""


class Tuning(msgspec.Struct, frozen=True):
    """When a call counts as a wait."""

    same_result_ns: int = 100_000
    """Most computation between two calls that wait, or between a collective and the call that waits for its result, for which they belong
    together. A mean or a stack takes some microseconds; more is a phase of the model."""
    empty_loader_ns: int = 2_000_000
    """Longest time to fetch a ready batch. A host that takes longer waits for the workers."""


TUNING = Tuning()

_RESULTS = (SyncKind.BARRIER, SyncKind.COLLECTIVE)
"""Kinds of collectives for whose results a host waits, by precedence."""
_WAIT, _BATCH, _GAP = range(3)
WAITED_FOR = frozenset((SyncKind.DEVICE_SYNC, *_RESULTS))


class HostSyncs(msgspec.Struct, frozen=True):
    """The calls in which a host waited for its busy device, in order of their ends. Times are on the trace's own clock."""

    row: Ints = np.empty(0, np.int64)
    """[W] event in the trace."""
    end: Ints = np.empty(0, np.int64)
    """[W] ns"""
    waited_ns: Array = np.empty(0)
    """[W] ns of the call in which the device was busy."""
    kind: Sequence[SyncKind] = ()
    """[W] ``barrier``, ``collective`` (the call waits for its result) or ``device_sync``. Calls with nearly no computation between them
    drain the queue together; they form a group, and have the first of these kinds among them."""
    queue_drain: Ints = np.empty(0, np.int64)
    """[W] number of the call's group."""
    cost_ns: Array = np.empty(0)
    """[W] ns of idle time that the call causes; in a group, in proportion to the time that each call waited."""


def host_syncs_and_idle(
    trace: RankTrace, comms: Collectives, computes: Mask, busy: Intervals, idle: Intervals
) -> tuple[HostSyncs, dict[str, Intervals]]:
    """Return the host synchronisations, and the parts of the ``idle`` time that each kind of them causes.

    ``computes``: mask of the kernels that compute; ``busy``: when the device computes, copies or communicates, without checkpoints;
    ``idle``: when it is idle because the host had not launched, without waits for data.
    """
    waits = _find_waits(trace, comms, computes, busy)
    if not len(waits.row) or not len(idle[0]):
        return waits, {}
    starts, ends = idle
    # Work of the device in a full launch queue.
    most_ns = QUEUED_LAUNCHES * total(busy) / max(int(trace.category_mask(*DEVICE).sum()), 1)
    # Batches from loaders with workers, and whether the host had to wait for them.
    with_workers = trace.name_mask(lambda name: classify.IN_PROCESS not in name)
    batches = np.flatnonzero(classify.next_batches(trace) & with_workers)
    late = trace.duration_ns[batches] > TUNING.empty_loader_ns
    saved, last = _saved_per_gap(waits, idle, trace.end_ns[batches], late, most_ns)
    cost = np.bincount(waits.queue_drain[last], saved, minlength=int(waits.queue_drain.max()) + 1)
    waited = np.bincount(waits.queue_drain, waits.waited_ns)
    waits = replace(waits, cost_ns=(cost / waited)[waits.queue_drain] * waits.waited_ns)
    kind = np.array(waits.kind)[last]
    caused = {
        name: union(starts[kind == name], np.minimum(starts + saved, ends)[kind == name])
        for name in WAITED_FOR
    }
    return waits, {name: intervals for name, intervals in caused.items() if len(intervals[0])}


def _saved_per_gap(
    waits: HostSyncs, idle: Intervals, batch_end: Ints, batch_late: Mask, most_ns: float
) -> tuple[Array, Ints]:
    """([gaps] ns by which each gap of ``idle`` would be shorter without the waits, [gaps] index of the last wait before its end, else 0.) A
    late batch does not come earlier if the host is earlier, so the time saved since the previous batch is lost."""
    starts, ends = idle
    of_kind = ((_WAIT, waits.end), (_BATCH, batch_end), (_GAP, ends))
    what = np.concatenate([np.full(len(at), kind) for kind, at in of_kind])
    index = np.concatenate([np.arange(len(at)) for _, at in of_kind])
    order = np.lexsort((index, what, np.concatenate([at for _, at in of_kind])))
    waited_ns, late, lengths = waits.waited_ns.tolist(), batch_late.tolist(), (ends - starts).tolist()
    gain, last = np.zeros(len(starts)), np.zeros(len(starts), np.int64)
    lead = saved = 0.0
    latest = gaps = since_batch = 0
    for kind, i in zip(what[order].tolist(), index[order].tolist(), strict=True):
        if kind == _WAIT:
            lead, latest = min(lead + waited_ns[i], saved + most_ns), i
        elif kind == _GAP:
            gained = min(lead - saved, float(lengths[i]))
            gain[i], last[i] = gained, latest
            saved, gaps = saved + gained, i + 1
        else:
            if late[i]:
                saved -= float(gain[since_batch:gaps].sum())
                gain[since_batch:gaps], lead = 0.0, saved
            since_batch = gaps
    return gain, last


def _find_waits(trace: RankTrace, comms: Collectives, computes: Mask, busy: Intervals) -> HostSyncs:
    """The calls that wait for a busy device, with their kinds and groups, but without costs."""
    launch, launched = launch_pairs(trace, computes)
    rows, waited = _waiting_calls(trace, launch, busy)
    if not len(rows):
        return HostSyncs()
    order = np.argsort(trace.end_ns[launch], kind="stable")
    at = trace.end_ns[launch][order]
    work = np.concatenate(([0], np.cumsum(trace.duration_ns[launched][order])))
    before = work[np.searchsorted(at, trace.start_ns[rows])]
    queue_drain = np.concatenate(([0], np.cumsum(np.diff(before) > TUNING.same_result_ns)))
    issued = work[np.searchsorted(at, comms.issued)]
    # The first kind of ``_RESULTS`` in each group.
    places = np.full(int(queue_drain[-1]) + 1, len(_RESULTS))
    np.minimum.at(places, queue_drain, _result_kinds(comms, issued, trace.start_ns[rows], before))
    # A group that hardly waited found the queue nearly empty, and does not count.
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


def _waiting_calls(trace: RankTrace, launch: Ints, busy: Intervals) -> tuple[Ints, Array]:
    """Calls that wait for the device on threads that launch work, in order of their ends, and ns of each in which the device was busy. A
    call that returns when its own copy is done counts only if it waited for at least ``LAUNCH_SLACK_NS``."""
    launching = np.isin(trace.lane, np.unique(trace.lane[launch]))
    calls = trace.category_mask(*CUDA_CALLS) & trace.name_mask(classify.is_sync_call) & launching
    # Runtime calls that return only when their own copy is done.
    copies, copied = launch_pairs(trace, trace.category_mask("gpu_memcpy"))
    copies = copies[trace.end_ns[copies] >= trace.end_ns[copied]]
    rows = np.unique(np.concatenate((np.flatnonzero(calls), copies[launching[copies]])))
    rows = rows[np.argsort(trace.end_ns[rows], kind="stable")]
    waited = covered(busy, trace.start_ns[rows], trace.end_ns[rows])
    keep = calls[rows] | (waited >= LAUNCH_SLACK_NS)
    return rows[keep], waited[keep]


def _result_kinds(comms: Collectives, issued: Ints, at: Ints, computed: Ints) -> Ints:
    """[W] index in ``_RESULTS`` of the kind of collective for whose result each call (at times ``at``) waits, else ``len(_RESULTS)``. A
    call waits for a result if nearly no computation was launched since the collective was issued. ``issued`` and ``computed``: ns of
    computation launched before each collective and each call."""
    places = np.full(len(at), len(_RESULTS))
    for place in reversed(range(len(_RESULTS))):
        rows = np.flatnonzero(comms.of_kind(_RESULTS[place]))
        rows = rows[np.argsort(comms.issued[rows], kind="stable")]
        if len(rows):
            latest = np.searchsorted(comms.issued[rows], at, side="right") - 1
            since = computed - issued[rows[np.clip(latest, 0, None)]]
            places[(latest >= 0) & (since <= TUNING.same_result_ns)] = place
    return places
