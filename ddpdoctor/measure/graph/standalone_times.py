"""Compute the time that each rank would need if it did not wait for others: for its batches, from logs and from windows, and for its
host to issue a step.

The batch time of the loader's workers matters even if the rank does not wait for them. Ranks synchronize in every step, so the slowest
rank sets the step time. That rank waits for every batch. The other ranks never wait, because their workers, even if nearly as slow,
prepare batches in the meantime. Fixing only the rank that waits would therefore gain very little. The batch time is elapsed time /
(batches used + increase of ready batches), over periods in which no worker was idle because of a full queue.

Likewise, the time in which a host issues a step matters even if its device is not idle because of it. If all hosts are slower than
their devices, only the slowest host's device visibly waits for launches. The other hosts run ahead, and the idle time of their devices
becomes part of the wait for that rank. The measure is

    issue time = length of the step on the host - time in which the host was blocked

which is a lower bound of the rank's step time, also if other ranks are fixed. A host is blocked in a call that waits for the device, in
a launch while the launch queue is full, and in a collective on the CPU. Waiting for data, garbage collection and saving are priced
separately and do not count either. Time that no event covers counts as Python between the operators, up to the usual amount. More is
of unknown kind and does not count: hosts may wait for each other without record. The estimate is therefore rather too low than too high;
a host with an unknown issue time is not reported as a straggler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Array, Intervals, Ints, covered, subtract, union_of
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.taxonomy import HOST_IDLE, INDEX, Component, LateCause
from ddpdoctor.measure.window import (
    DEVICE,
    QUEUED_LAUNCHES,
    RUNTIME_CALLS,
    Window,
    event_union,
    garbage_collections,
    in_steps,
    launch_pairs,
    main_lane,
)
from ddpdoctor.rundir.stepevents import EventKind
from ddpdoctor.trace import RankTrace, classify

from .graph import READY_BATCH_SHARE, CycleGroup

_FEWEST_PAIRS = 8
"""Fewest pairs of neighbouring batches, and batches prepared between them, for a batch time."""
_DEFAULT_PREFETCH = 2
"""DataLoader's prefetch_factor."""


def batch_time_ns(log: RankLog) -> float | None:
    """Return the ns per batch that the workers of this rank's training loader take together; None if there are no workers, or too few
    batches were requested while all workers were busy."""
    loader = log.usual_loader
    if loader is None or loader not in log.loaders_with_workers:
        return None
    settings = log.main_loader_settings or {}
    # With this many ready batches or more, all of one worker's may be ready, so that it is idle. Without settings, one worker is assumed.
    prefetch = settings.get("prefetch_factor") or _DEFAULT_PREFETCH
    most_ready = int((prefetch - 1) * (settings.get("num_workers") or 1) + 1)
    elapsed_ns, prepared, pairs = 0.0, 0, 0
    for (since_ns, before), (at_ns, ready) in _consecutive_requests(log, loader):
        if 0 <= before < most_ready and 0 <= ready < most_ready:
            # The numbers of ready batches at two requests show how many were prepared between them.
            elapsed_ns += at_ns - since_ns
            prepared += 1 + ready - before
            pairs += 1
    if pairs < _FEWEST_PAIRS or prepared < _FEWEST_PAIRS:
        return None
    return elapsed_ns / prepared


def loader_limit_ns(log: RankLog) -> float | None:
    """Return the ns that the workers take together for the batches of a step, a lower limit of its mean length; None if unknown."""
    batch_ns = batch_time_ns(log)
    if batch_ns is None:
        return None
    of_loader = [
        sum(event.gives_batch and event.loader == log.usual_loader for event in step.events)
        for step in log.steps
        if step.in_full
    ]
    return batch_ns * float(np.mean(of_loader))


def standalone_data_ns(
    group: CycleGroup,
    batch_times_ns: Sequence[float | None],
    batches: Sequence[float],
    waits: Array | None = None,
) -> Array | None:
    """Return [N, R] ns of waiting for data that each rank would have in each cycle if it waited for no other rank.

    For everything but data, a rank needs the cycle without its ``waits`` [N, R] for other ranks (default: those of the group). Its workers
    need the batch time for each of its ``batches`` per step. Returns None if no batch time is known.
    """
    if all(each is None for each in batch_times_ns):
        return None
    data = group.work[..., INDEX[Component.DATA]].sum(axis=1)
    rest = group.duration[:, None] - data - (np.nansum(group.wait, axis=1) if waits is None else waits)
    needed = [(each_ns or 0.0) * number for each_ns, number in zip(batch_times_ns, batches, strict=True)]
    standalone_ns: Array = np.maximum(data, np.array(needed) - rest)
    return standalone_ns


def batches_per_step(log: RankLog) -> float:
    """Return the mean number of batches that the training loop uses in a step."""
    counts = [sum(event.gives_batch for event in step.events) for step in log.steps if step.in_full]
    return float(np.mean(counts)) if counts else 0.0


_Request = tuple[int, int]
"""A request for a batch: its time (epoch ns) and the number of ready batches (-1 if unknown)."""


def _consecutive_requests(log: RankLog, loader: int) -> Iterator[tuple[_Request, _Request]]:
    """Pairs of consecutive requests in the same pass over the loader, in the same or neighbouring steps."""
    before: _Request | None = None
    last_step = None
    for step in log.steps:
        if not step.in_full or (last_step is not None and step.number != last_step + 1):
            before = None
        last_step = step.number
        for event in step.events:
            if event.kind == EventKind.ITERATION or event.exhausted:
                before = None
            elif event.kind == EventKind.DATA and event.loader == loader:
                request = step.start_of(event), event.batches_ready
                if before is not None:
                    yield before, request
                before = request


class LoaderTuning(msgspec.Struct, frozen=True):
    """Which batches count for the batch time."""

    fewest_batches: int = 4
    """Fewest batches in a window. It has about ten steps, and the first ones use batches that were prepared before."""
    longest_ready_ns: int = 500_000
    """Longest time to fetch a ready batch, if this is more than ``READY_BATCH_SHARE`` of the interval between batches. It takes tenths
    of a millisecond, which may be a large share of a short step."""
    waiting_share: float = 0.5
    """Least share of the batches for which, as for the batch before, the host waited. With fewer, most batches were ready."""


LOADER = LoaderTuning()


def standalone_data_of_windows(group: CycleGroup, windows: Sequence[Window]) -> Array | None:
    """Return :func:`standalone_data_ns` [N, R] of jobs on a device; None if no loader's workers limit the step.

    Hosts run ahead of the device, so they wait for each batch of a loader that is too slow, even if the device is not idle because of it.
    """
    times = [_batch_time_ns(window) for window in windows]
    if all(time is None for time in times):
        return None
    waits = np.nansum(group.wait - group.concurrent_compute_in_wait, axis=1)
    batches = [
        (classify.next_batches(of.trace) & in_steps(of)).sum() / max(len(of.steps), 1) for of in windows
    ]
    return standalone_data_ns(group, times, batches, waits)


def _batch_time_ns(window: Window) -> float | None:
    """ns per batch of the workers of this rank; None if there are no workers, or if most batches were ready.

    If the host waited for two batches in a row, the second one was prepared between the ends of the two waits.
    """
    trace = window.trace
    rows = np.flatnonzero(classify.next_batches(trace))
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    if len(rows) < LOADER.fewest_batches or classify.IN_PROCESS in trace.name_of(int(rows[0])):
        return None
    ends = trace.end_ns[rows].astype(float)
    longest_ns = max(READY_BATCH_SHARE * float(np.median(np.diff(ends))), LOADER.longest_ready_ns)
    waited = ends - trace.start_ns[rows] >= longest_ns
    in_a_row = waited[:-1] & waited[1:]
    if in_a_row.sum() < max(LOADER.fewest_batches - 1, LOADER.waiting_share * len(rows)):
        return None
    return float(np.diff(ends)[in_a_row].mean())


class IssueTuning(msgspec.Struct, frozen=True):
    """When a host is blocked, and which steps count."""

    blocked_ns: int = 100_000
    """A longer runtime call waits for something. A launch takes some microseconds."""
    nearly_full: float = 0.8
    """Share of the launch queue's capacity from which on the device limits the host; also of the largest number of queued launches, if the
    queue is usually near that."""
    fewest_queued: int = 32
    """A queue that never had this many launches was never full, whatever the driver's limit."""
    fewest_steps: int = 2
    """Fewest steps. A single step may contain a pause."""
    most_between: float = 1.0
    """Largest ratio of the time between a host's events to the time in them. In models without pauses, events covered 0.67 to 0.94 of
    the time in which the host was not blocked."""


ISSUE = IssueTuning()
_IDLE = [INDEX[component] for component in HOST_IDLE]


def issue_time_ns(window: Window) -> float:
    """Return the ns that the host needs to issue a step: the lesser of mean and median over the window's steps, so that a single pause
    does not count. NaN if fewer than two steps are marked, or if launches or other host events were not recorded."""
    trace = window.trace
    calls, events = launch_pairs(trace, trace.category_mask(*DEVICE))
    known = window.on_device and window.shows_host and len(calls) > 0
    if not known or len(window.steps) < ISSUE.fewest_steps:
        return float("nan")
    start, end = np.array([(start, end) for _, start, end in window.steps], np.int64).T - window.shifted_ns
    # When the host does not issue work: it waits, or does work that is priced separately.
    runtime, main = trace.category_mask(*RUNTIME_CALLS), main_lane(trace)
    waits = runtime & (trace.name_mask(classify.is_sync_call) | (trace.duration_ns > ISSUE.blocked_ns))
    collectives = trace.category_mask("cpu_op") & trace.name_mask(classify.is_gloo)
    late = trace.duration_ns > READY_BATCH_SHARE * float(np.median(end - start))
    saves = trace.category_mask("python_function") & (trace.lane == main) & trace.name_mask(classify.is_save)
    idle = waits | collectives | (classify.next_batches(trace) & late) | saves
    blocked = union_of(event_union(trace, idle), garbage_collections(trace, main))
    launched, excess = _queue_delays(trace, calls, events, blocked)
    before = np.concatenate(([0.0], np.cumsum(excess)))
    waited = before[np.searchsorted(launched, end)] - before[np.searchsorted(launched, start)]
    # When host events were recorded, on any thread.
    seen = event_union(trace, trace.category_mask("cpu_op", "python_function", *RUNTIME_CALLS))
    shown = covered(subtract(seen, blocked), start, end)
    free = (end - start) - covered(blocked, start, end) - waited
    needed = np.minimum(free, shown * (1.0 + ISSUE.most_between))
    return max(0.0, float(min(needed.mean(), np.median(needed))))


def _queue_delays(trace: RankTrace, calls: Ints, events: Ints, blocked: Intervals) -> tuple[Ints, Array]:
    """(Starts of the launches in order, ns of each that a full queue may have cost.) The latter is the time since the previous launch
    in excess of the mean with room in the queue; all of it if the queue never had room. ``events`` are those that were launched."""
    order = np.argsort(trace.end_ns[calls], kind="stable")
    start, end = trace.start_ns[calls][order], trace.end_ns[calls][order]
    # Launches in the queue when each launch ended.
    done = np.sort(trace.end_ns[trace.category_mask(*DEVICE)])
    # Device events without a launch in the trace were in the queue when the window began.
    unknown = len(done) - len(events)
    queued = unknown + np.arange(len(end)) - np.searchsorted(done, end)
    if not unknown:
        # Earlier device events may not have been recorded: until the first recorded launch has run, use the number at that time.
        seen = int(np.searchsorted(end, trace.start_ns[events].min()))
        queued[:seen] = np.maximum(queued[:seen], queued[min(seen, len(queued) - 1)])
    # Nearly full, or near its usual maximum.
    full = queued >= ISSUE.nearly_full * QUEUED_LAUNCHES
    near_most = queued >= ISSUE.nearly_full * queued.max()
    if queued.max() >= ISSUE.fewest_queued and 2 * near_most.sum() >= len(queued):
        full |= near_most
    since = np.concatenate(([0.0], np.diff(end) - covered(blocked, end[:-1], end[1:])))
    usual = float(since[~full].mean()) if (~full).any() else 0.0
    return start, np.where(full, np.clip(since - usual, 0.0, None), 0.0)


def with_issue_times(group: CycleGroup, times_ns: Array) -> CycleGroup:
    """Return the group with the hosts' issue times ``times_ns`` [R], and with the idle time of devices that is hidden in waits for other
    ranks: the additional time for which each rank's device would wait for its host, if the rank waited for no other rank.

    Without other ranks, a rank needs the cycle without its waits and with the wait for data that they hide, but at least the time in
    which its host issues the step. Transfer that would then overlap with work, as on the slowest rank, is not a wait.
    """
    waits = np.nansum(group.wait - group.concurrent_compute_in_wait, axis=1)
    spent = group.work.sum(axis=(1, 3))
    if group.hidden is not None:
        waits = np.clip(waits - group.hidden[..., INDEX[Component.LAUNCH]].sum(axis=1), 0, None)
        spent = spent + group.hidden.sum(axis=(1, 3))
    idle = group.duration[:, None] - spent
    transfer = (idle - waits).min(axis=1, keepdims=True)
    standalone_cycle = group.duration[:, None] - np.maximum(idle - transfer, 0.0)
    if LateCause.DATA in group.standalone_ns:
        data = group.work[..., INDEX[Component.DATA]].sum(axis=1)
        standalone_cycle = standalone_cycle + np.clip(group.standalone_ns[LateCause.DATA] - data, 0, None)
    extra_idle = np.clip(np.nan_to_num(times_ns - standalone_cycle), 0, None)
    timed = replace(group, issue_time_ns=np.minimum(np.nan_to_num(times_ns), group.duration[:, None]))
    if not extra_idle.any():
        return timed
    return timed.with_standalone(LateCause.HOST, group.work[..., _IDLE].sum(axis=(1, 3)) + extra_idle)
