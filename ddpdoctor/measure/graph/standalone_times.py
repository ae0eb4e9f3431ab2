"""Time that each rank would need without waiting for others: for its batches, from logs and from windows, and for its host to issue a
step.

The batch time of the loader's workers matters even where the rank does not wait for them. Ranks synchronize in every step, so the
slowest rank sets the step time. That rank waits for every batch, while the other ranks' workers, nearly as slow, build up a reserve and
their ranks never wait. Fixing only the rank that waits would gain very little. The batch time is measured by production: batches that
were used plus those that became ready, over the time that took, while no worker was idle because the queue was full.

The same holds for the time in which a host issues a step, even where its device is not idle for it. Where all hosts are slower than
their devices, only the slowest one's device visibly waits for launches. The other hosts run ahead, and their devices' idle time moves
into the wait for that rank. What counts is

    issue time = length of the step on the host - time in which the host was blocked

which is a lower bound of the rank's step time, also if other ranks are fixed. A host is blocked in a call that waits for the device, in
a launch while the launch queue is full, and in a collective on the CPU. Waiting for data, garbage collection and saving have prices of
their own and do not count either. Time that no event covers is Python between the operators, up to the usual amount. Beyond that it is
unknown, neither work nor waiting, and bounds nothing: hosts that wait for each other without record have steps of one length. The
result is rather too small than too large: a host with an unknown issue time is not reported as a straggler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Array, Intervals, Ints, covered, subtract, union_of
from ddpdoctor.measure.steplog import RankLog, usual_loader
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
from ddpdoctor.rundir import EventKind
from ddpdoctor.trace import RankTrace, classify

from .graph import READY_BATCH_SHARE, CycleGroup

_FEWEST_PAIRS = 8
"""Fewest pairs of neighbouring batches, and batches prepared between them, for a batch time."""
_DEFAULT_PREFETCH = 2
"""DataLoader's prefetch_factor."""


def batch_time_ns(log: RankLog) -> float | None:
    """ns that the workers of this rank's training loader take per batch; None where there are none, or where a worker was always idle."""
    loader = usual_loader(log.steps)
    if loader is None or loader not in log.loaders_with_workers:
        return None
    settings = log.main_loader_settings or {}
    # From as many ready batches on a worker may be idle: all its own are ready. Without settings, one worker is assumed.
    deep = settings.get("prefetch_factor") or _DEFAULT_PREFETCH
    room = int((deep - 1) * (settings.get("num_workers") or 1) + 1)
    took, made, pairs = 0.0, 0, 0
    for (since_ns, before), (at_ns, ready) in _neighbours(log, loader):
        if 0 <= before < room and 0 <= ready < room:
            # From the ready batches at two requests follows how many were prepared between them.
            took += at_ns - since_ns
            made += 1 + ready - before
            pairs += 1
    if pairs < _FEWEST_PAIRS or made < _FEWEST_PAIRS:
        return None
    return took / made


def standalone_data_ns(
    group: CycleGroup,
    batch_times_ns: Sequence[float | None],
    batches: Sequence[float],
    waits: Array | None = None,
) -> Array | None:
    """[N, R] ns: the wait for data that each rank would have in each cycle if it waited for no other rank.

    A rank needs, for everything but data, the cycle without its own ``waits`` [N, R] (by default all of the group's); its workers need
    its batch time for each of its ``batches`` per step. None where no batch time is known.
    """
    if all(each is None for each in batch_times_ns):
        return None
    data = group.work[..., INDEX[Component.DATA]].sum(axis=1)
    rest = group.duration[:, None] - data - (np.nansum(group.wait, axis=1) if waits is None else waits)
    needed = [(each_ns or 0.0) * number for each_ns, number in zip(batch_times_ns, batches, strict=True)]
    standalone_ns: Array = np.maximum(data, np.array(needed) - rest)
    return standalone_ns


def batches_per_step(log: RankLog) -> float:
    """Mean number of batches that the training loop takes in a step."""
    counts = [sum(event.gives_batch for event in step.events) for step in log.steps if step.in_full]
    return float(np.mean(counts)) if counts else 0.0


_Request = tuple[int, int]
"""A request for a batch: time, epoch ns, and number of ready batches; -1 where unknown."""


def _neighbours(log: RankLog, loader: int) -> Iterator[tuple[_Request, _Request]]:
    """Requests for two batches in a row, of the same pass over the loader and of neighbouring steps."""
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
    """A window has about ten steps, of which the first use the reserve."""
    longest_ready_ns: int = 500_000
    """Taking a ready batch takes tenths of a millisecond, which may be a large share of a short step."""
    mostly: float = 0.5
    """Share of the batches for which the host must wait twice in a row: else most were ready."""


LOADER = LoaderTuning()


def standalone_data_of_windows(group: CycleGroup, windows: Sequence[Window]) -> Array | None:
    """[N, R] :func:`standalone_data_ns` of jobs on a device; None where no loader's workers limit the step.

    Hosts run ahead of the device: they wait for each batch of a loader that is too slow, even where the device is not idle for it.
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
    """ns per batch of the workers of this rank. None where there are no workers, or where most batches were ready.

    If the host waited for two batches in a row, none was ready at the first, so the second was prepared between the ends of the two
    waits.
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
    if in_a_row.sum() < max(LOADER.fewest_batches - 1, LOADER.mostly * len(rows)):
        return None
    return float(np.diff(ends)[in_a_row].mean())


class IssueTuning(msgspec.Struct, frozen=True):
    """When a host is blocked, and which steps count."""

    blocked_ns: int = 100_000
    """A call of the runtime that takes longer waits for something: a launch takes some microseconds."""
    nearly_full: float = 0.8
    """Share of the launch queue's capacity, or of the largest number of launches in it where it is usually near that: then the device
    limits the host."""
    fewest_queued: int = 32
    """A queue that never had more launches was never full, independently of the driver's limit."""
    fewest_steps: int = 2
    """Fewest steps: a single one may contain a pause."""
    most_between: float = 1.0
    """Largest ratio of time between a host's events to time in them: in steps of models without pauses, events covered 0.67 to 0.94 of
    the time in which the host was not blocked."""


ISSUE = IssueTuning()
_IDLE = [INDEX[component] for component in HOST_IDLE]


def issue_time_ns(window: Window) -> float:
    """ns that the host needs for a step: the mean or the median over the window's steps, whichever is less, so that a single
    pause does not count. NaN where less than two steps are marked, or no launches or nothing else of the host was recorded."""
    trace = window.trace
    calls, events = launch_pairs(trace, trace.category_mask(*DEVICE))
    known = window.on_device and window.shows_host and len(calls) > 0
    if not known or len(window.steps) < ISSUE.fewest_steps:
        return float("nan")
    start, end = np.array([(start, end) for _, start, end in window.steps], np.int64).T - window.shifted_ns
    # When the host does not issue work: it waits, or does work that is measured separately.
    runtime, main = trace.category_mask(*RUNTIME_CALLS), main_lane(trace)
    waits = runtime & (trace.name_mask(classify.is_sync_call) | (trace.duration_ns > ISSUE.blocked_ns))
    collectives = trace.category_mask("cpu_op") & trace.name_mask(classify.is_gloo)
    late = trace.duration_ns > READY_BATCH_SHARE * float(np.median(end - start))
    saves = trace.category_mask("python_function") & (trace.lane == main) & trace.name_mask(classify.is_save)
    idle = waits | collectives | (classify.next_batches(trace) & late) | saves
    blocked = union_of(event_union(trace, idle), garbage_collections(trace, main))
    launched, excess = _queued(trace, calls, events, blocked)
    before = np.concatenate(([0.0], np.cumsum(excess)))
    waited = before[np.searchsorted(launched, end)] - before[np.searchsorted(launched, start)]
    # When an event shows what the host did, on any of its threads.
    seen = event_union(trace, trace.category_mask("cpu_op", "python_function", *RUNTIME_CALLS))
    shown = covered(subtract(seen, blocked), start, end)
    free = (end - start) - covered(blocked, start, end) - waited
    needed = np.minimum(free, shown * (1.0 + ISSUE.most_between))
    return max(0.0, float(min(needed.mean(), np.median(needed))))


def _queued(trace: RankTrace, calls: Ints, events: Ints, blocked: Intervals) -> tuple[Ints, Array]:
    """(starts of the launches in order, ns before the end of each that a full queue may have cost): the time since the previous launch
    beyond the usual with room in the queue; all of it where there never was room. ``events`` are those that were launched."""
    order = np.argsort(trace.end_ns[calls], kind="stable")
    start, end = trace.start_ns[calls][order], trace.end_ns[calls][order]
    # Launches in the queue when each launch ended.
    done = np.sort(trace.end_ns[trace.category_mask(*DEVICE)])
    # Device events without a launch in the trace were in the queue when the window began.
    unknown = len(done) - len(events)
    queued = unknown + np.arange(len(end)) - np.searchsorted(done, end)
    if not unknown:
        # Or were not recorded at all: until the first recorded launch has run, use the number at that time.
        seen = int(np.searchsorted(end, trace.start_ns[events].min()))
        queued[:seen] = np.maximum(queued[:seen], queued[min(seen, len(queued) - 1)])
    # Nearly full, or at its usual maximum.
    full = queued >= ISSUE.nearly_full * QUEUED_LAUNCHES
    near_most = queued >= ISSUE.nearly_full * queued.max()
    if queued.max() >= ISSUE.fewest_queued and 2 * near_most.sum() >= len(queued):
        full |= near_most
    since = np.concatenate(([0.0], np.diff(end) - covered(blocked, end[:-1], end[1:])))
    usual = float(since[~full].mean()) if (~full).any() else 0.0
    return start, np.where(full, np.clip(since - usual, 0.0, None), 0.0)


def with_issue_times(group: CycleGroup, times_ns: Array) -> CycleGroup:
    """The group with the hosts' issue times [R] ns, and the devices' idle time hidden in waits for other ranks: what each rank's device
    would wait for its host beyond the measured idle time, if the rank waited for no other.

    Without other ranks, a rank needs the cycle without its waits and with the wait for data that they hide, but at least the time in
    which its host issues the step. Transfer that would then overlap with work, as on the slowest rank, is no wait.
    """
    waits = np.nansum(group.wait - group.concurrent_compute_in_wait, axis=1)
    spent = group.work.sum(axis=(1, 3))
    if group.hidden is not None:
        waits = np.clip(waits - group.hidden[..., INDEX[Component.LAUNCH]].sum(axis=1), 0, None)
        spent = spent + group.hidden.sum(axis=(1, 3))
    idle = group.duration[:, None] - spent
    transfer = (idle - waits).min(axis=1, keepdims=True)
    alone = group.duration[:, None] - np.maximum(idle - transfer, 0.0)
    if LateCause.DATA in group.standalone_ns:
        data = group.work[..., INDEX[Component.DATA]].sum(axis=1)
        alone = alone + np.clip(group.standalone_ns[LateCause.DATA] - data, 0, None)
    more = np.clip(np.nan_to_num(times_ns - alone), 0, None)
    timed = replace(group, issue_time_ns=np.minimum(np.nan_to_num(times_ns), group.duration[:, None]))
    if not more.any():
        return timed
    return timed.with_standalone(LateCause.HOST, group.work[..., _IDLE].sum(axis=(1, 3)) + more)
