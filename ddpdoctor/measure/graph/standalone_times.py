"""What each rank would need if it waited for no other: for its batches, by logs and by windows, and for its host to issue a step.

How fast loader workers make batches tells, also where the rank does not wait for them: ranks meet in every step, so the rank
whose workers are slowest by a hair sets the pace: it waits for every batch, while the others' workers, nearly as slow, build up
a reserve and their ranks never wait. Mending only the rank that waits would gain that hair. What tells is the pace of
production: batches that were used plus those that came to stand ready, over the time that took, while no worker was idle for
want of room.

The time that its host needs to issue a step tells the same, also where its device does not stand idle for it. Where all hosts
are slower than their devices, only the slowest one's device is seen to wait for launches: the other hosts, quicker by a hair,
run ahead, their devices' idle time moves into the wait for that rank, and mending it alone would gain that hair. What tells is
what each host needs to issue a step,

    issue time = length of the step on the host - time in which the host was blocked

which no rank can beat, whoever else is mended. Blocked is a host in a call that waits for the device, in a launch while the
launch queue is full, and in a collective on the CPU. Waiting for data, collecting garbage and saving have prices of their own
and do not count either. Time that no event covers is Python between the operators, as far as there usually is; beyond that it is
unknown, neither work nor waiting, and bounds nothing: hosts that wait for each other unseen have steps of one length, which is
nobody's pace. What remains is rather too little than too much: a host whose issue time is not known is not held to be a straggler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import Array, Intervals, Ints, covered, subtract, union_of
from ddpdoctor.measure.steplog import RankLog, usual_loader
from ddpdoctor.measure.taxonomy import HOST_IDLE, INDEX, Component, LateCause
from ddpdoctor.measure.window import (
    DEVICE,
    QUEUED_LAUNCHES,
    RUNTIME_CALLS,
    Window,
    collecting,
    event_union,
    launch_pairs,
    main_lane,
)
from ddpdoctor.rundir import EventKind
from ddpdoctor.trace import RankTrace, classify

from .graph import READY_BATCH_SHARE, CycleGroup

_FEWEST_PAIRS = 8
"""Pairs of neighbouring batches, and batches made between them, from which a batch time is taken."""
_DEFAULT_PREFETCH = 2
"""DataLoader's prefetch_factor."""


def batch_time_ns(log: RankLog) -> float | None:
    """Time that the workers of this rank's training loader take per batch, ns; None where there are none, or
    where a worker was always idle."""
    loader = usual_loader(log.steps)
    if loader is None or loader not in log.loaders_with_workers:
        return None
    room = _room(log.main_loader_settings or {})
    took, made, pairs = 0.0, 0, 0
    for (since_ns, before), (at_ns, ready) in _neighbours(log, loader):
        if 0 <= before < room and 0 <= ready < room:
            # With a reserve of q batches at each request, this many were made between the two.
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

    A rank needs, for everything but data, the cycle without its own ``waits`` [N, R] (by default all of the group's); its
    workers need its batch time for each of its ``batches`` a step. None where no batch time is known.
    """
    if all(each is None for each in batch_times_ns):
        return None
    data = group.work[..., INDEX[Component.DATA]].sum(axis=1)
    rest = group.duration[:, None] - data - (np.nansum(group.wait, axis=1) if waits is None else waits)
    needed = np.array(
        [(each_ns or 0.0) * number for each_ns, number in zip(batch_times_ns, batches, strict=True)]
    )
    standalone_ns: Array = np.maximum(data, needed[None, :] - rest)
    return standalone_ns


def batches_per_step(log: RankLog) -> float:
    """Mean number of batches that the training loop takes in a step."""
    counts = [sum(event.gives_batch for event in step.events) for step in log.steps if step.in_full]
    return float(np.mean(counts)) if counts else 0.0


def _room(loader: dict[str, Any]) -> int:
    """Ready batches from which on some worker may have nothing to do: all its own are ready. Where the settings are lost, as of one
    worker."""
    deep = loader.get("prefetch_factor") or _DEFAULT_PREFETCH
    return int((deep - 1) * (loader.get("num_workers") or 1) + 1)


_Request = tuple[int, int]
"""For a batch: when, epoch ns, and how many stood ready; -1 where that is not known."""


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
    """From which batches the time that workers need is taken."""

    fewest_batches: int = 4
    """A window has some ten steps, of which the first are those of the reserve."""
    longest_ready_ns: int = 500_000
    """Taking a batch that stands ready takes tenths of a millisecond, which may be a larger part of a short step."""
    mostly: float = 0.5
    """Part of the batches for which the host must wait two times in a row: else most stood ready."""


LOADER = LoaderTuning()


def standalone_data_of_windows(group: CycleGroup, windows: Sequence[Window]) -> Array | None:
    """[N, R] :func:`standalone_data_ns` of jobs on a device; None where no worker sets the time.

    Their hosts run ahead of the device: they wait for each batch of a loader that is not quick enough, also where the device
    does not stand still for it.
    """
    times = [_batch_time_ns(window) for window in windows]
    if all(time is None for time in times):
        return None
    waits = np.nansum(
        group.wait - (0.0 if group.concurrent_compute_in_wait is None else group.concurrent_compute_in_wait),
        axis=1,
    )
    batches = [classify.next_batches(of.trace).sum() / max(len(of.steps), 1) for of in windows]
    return standalone_data_ns(group, times, batches, waits)


def _batch_time_ns(window: Window) -> float | None:
    """Time per batch of the workers of this rank, ns. None where there are no workers, or where most batches stood ready.

    The host waited for two batches in a row: none stood ready at the first, so the second was made between the ends of the
    two waits.
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
    """When a host is blocked, and what its time is taken from."""

    blocked_ns: int = 100_000
    """A call of the runtime that takes longer waits for something: a launch takes some microseconds."""
    nearly_full: float = 0.8
    """Of the launch queue, or of the most that it held where it mostly holds nearly so much: then the device sets the time."""
    fewest_queued: int = 32
    """A queue that never held more was never full, whatever the driver's limit."""
    fewest_steps: int = 2
    """One step alone may hold a pause, and nothing tells."""
    most_between: float = 1.0
    """Time between a host's events for each that they take: where steps of models ran without pauses, events covered 0.67 to
    0.94 of the time in which the host was not blocked."""


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
    blocked = _blocked(trace, float(np.median(end - start)))
    launched, excess = _queued(trace, calls, events, blocked)
    before = np.concatenate(([0.0], np.cumsum(excess)))
    waited = before[np.searchsorted(launched, end)] - before[np.searchsorted(launched, start)]
    # When an event says what the host did, on any of its threads.
    seen = event_union(trace, trace.category_mask("cpu_op", "python_function", *RUNTIME_CALLS))
    shown = covered(subtract(seen, blocked), start, end)
    free = (end - start) - covered(blocked, start, end) - waited
    needed = np.minimum(free, shown * (1.0 + ISSUE.most_between))
    return max(0.0, float(min(needed.mean(), np.median(needed))))


def _blocked(trace: RankTrace, step_ns: float) -> Intervals:
    """When the host does not issue work: it waits, or does what is measured apart."""
    calls = trace.category_mask(*RUNTIME_CALLS)
    waits = calls & (trace.name_mask(classify.is_sync_call) | (trace.duration_ns > ISSUE.blocked_ns))
    collectives = trace.category_mask("cpu_op") & trace.name_mask(classify.is_gloo)
    batches = classify.next_batches(trace) & (trace.duration_ns > READY_BATCH_SHARE * step_ns)
    main = main_lane(trace)
    saves = trace.category_mask("python_function") & (trace.lane == main) & trace.name_mask(classify.is_save)
    return union_of(event_union(trace, waits | collectives | batches | saves), collecting(trace, main))


def _queued(trace: RankTrace, calls: Ints, events: Ints, blocked: Intervals) -> tuple[Ints, Array]:
    """(starts of the launches in order, ns before the end of each that a full queue may have cost): of the time since the
    launch before, what goes beyond the usual with room in the queue; all of it where there never was room."""
    order = np.argsort(trace.end_ns[calls], kind="stable")
    start, end = trace.start_ns[calls][order], trace.end_ns[calls][order]
    full = _full(_in_queue(trace, end, events))
    since = np.concatenate(([0.0], np.diff(end) - covered(blocked, end[:-1], end[1:])))
    usual = float(since[~full].mean()) if (~full).any() else 0.0
    return start, np.where(full, np.clip(since - usual, 0.0, None), 0.0)


def _in_queue(trace: RankTrace, launched: Ints, events: Ints) -> Ints:
    """How many launches the queue held at each of these times, in order, at which one ended; of the ``events`` that they
    launched."""
    done = np.sort(trace.end_ns[trace.category_mask(*DEVICE)])
    # Device events without a launch in the trace were in the queue when the window began.
    unknown = len(done) - len(events)
    queued: Ints = unknown + np.arange(len(launched)) - np.searchsorted(done, launched)
    if not unknown:
        # Or were not recorded at all: until the first launch that is in the trace has run, as many as at that time.
        seen = int(np.searchsorted(launched, trace.start_ns[events].min()))
        queued[:seen] = np.maximum(queued[:seen], queued[min(seen, len(queued) - 1)])
    return queued


def _full(queued: Ints) -> NDArray[np.bool_]:
    """When the queue held nearly as much as it can, or as it mostly did."""
    most = int(queued.max())
    full: NDArray[np.bool_] = queued >= ISSUE.nearly_full * QUEUED_LAUNCHES
    near_most = queued >= ISSUE.nearly_full * most
    return full | near_most if most >= ISSUE.fewest_queued and 2 * near_most.sum() >= len(queued) else full


def hidden_idle_ns(group: CycleGroup, times_ns: Array) -> Array:
    """[N, R] ns that each rank's device would wait for its host beyond what it does, if the rank waited for no other.

    By itself a rank needs the cycle without what it merely waits, and with the wait for data that hides there, but no less
    than its host needs to issue the step. Transfer beside which it would then work, as the slowest rank does, is no wait.
    """
    concurrent = 0.0 if group.concurrent_compute_in_wait is None else group.concurrent_compute_in_wait
    waits = np.nansum(group.wait - concurrent, axis=1)
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
    more: Array = np.clip(np.nan_to_num(times_ns - alone), 0, None)
    return more


def with_issue_times(group: CycleGroup, times_ns: Array) -> CycleGroup:
    """The group with the hosts' issue times [R] ns, and the devices' idle time that hides in waits for other ranks."""
    timed = replace(group, issue_time_ns=np.minimum(np.nan_to_num(times_ns), group.duration[:, None]))
    more = hidden_idle_ns(timed, times_ns)
    if not more.any():
        return timed
    idle = group.work[..., _IDLE].sum(axis=(1, 3))
    return timed.with_standalone(LateCause.HOST, idle + more)
