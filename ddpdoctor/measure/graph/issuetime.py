"""The time that each rank's host needs to issue a step, also where its device does not stand idle for it.

Ranks meet in every step. Where all hosts are slower than their devices, only the slowest one's device is seen to wait for
launches: the other hosts, quicker by a hair, run ahead, their devices' idle time moves into the wait for that rank, and
mending it alone would gain that hair. What tells is what each host needs to issue a step,

    issue time = length of the step on the host - time in which the host was blocked

which no rank can beat, whoever else is mended. Blocked is a host in a call that waits for the device, in a launch while the
launch queue is full, and in a collective on the CPU. Waiting for data, collecting garbage and saving have prices of their own
and do not count either. Time that no event covers is Python between the operators, as far as there usually is; beyond that it is
unknown, neither work nor waiting, and bounds nothing: hosts that wait for each other unseen have steps of one length, which is
nobody's pace. What remains is rather too little than too much: a host whose issue time is not known is not held to be a straggler.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import Array, Intervals, Ints, covered, subtract, union_of
from ddpdoctor.measure.taxonomy import HOST_IDLE, INDEX, Component, LateCause
from ddpdoctor.measure.window import (
    DEVICE,
    QUEUED_LAUNCHES,
    RUNTIME_CALLS,
    Window,
    collecting,
    launch_pairs,
    main_lane,
    rows_of,
)
from ddpdoctor.trace import RankTrace, classify

from .graph import READY_BATCH, CycleGroup


class Tuning(msgspec.Struct, frozen=True):
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


TUNING = Tuning()
_IDLE = [INDEX[component] for component in HOST_IDLE]


def issue_times_ns(windows: Sequence[Window]) -> Array:
    """[R] ns that each rank's host needs to issue a step; NaN where unknown."""
    return np.array([issue_time_ns(window) for window in windows])


def issue_time_ns(window: Window) -> float:
    """ns that the host needs for a step: the mean or the median over the window's steps, whichever is less, so that a single
    pause does not count. NaN where less than two steps are marked, or no launches or nothing else of the host was recorded."""
    trace = window.trace
    calls, events = launch_pairs(trace, trace.category_mask(*DEVICE))
    known = window.on_device and window.host_seen and len(calls) > 0
    if not known or len(window.steps) < TUNING.fewest_steps:
        return float("nan")
    start, end = np.array([(start, end) for _, start, end in window.steps], np.int64).T - window.shifted_ns
    blocked = _blocked(trace, float(np.median(end - start)))
    launched, excess = _queued(trace, calls, events, blocked)
    before = np.concatenate(([0.0], np.cumsum(excess)))
    waited = before[np.searchsorted(launched, end)] - before[np.searchsorted(launched, start)]
    told = covered(subtract(_told(trace), blocked), start, end)
    free = (end - start) - covered(blocked, start, end) - waited
    needed = np.minimum(free, told * (1.0 + TUNING.most_between))
    return max(0.0, float(min(needed.mean(), np.median(needed))))


def _told(trace: RankTrace) -> Intervals:
    """When an event says what the host did, on any of its threads."""
    return rows_of(trace, trace.category_mask("cpu_op", "python_function", *RUNTIME_CALLS))


def _blocked(trace: RankTrace, step_ns: float) -> Intervals:
    """When the host does not issue work: it waits, or does what is measured apart."""
    calls = trace.category_mask(*RUNTIME_CALLS)
    waits = calls & (trace.name_mask(classify.is_sync_call) | (trace.duration_ns > TUNING.blocked_ns))
    collectives = trace.category_mask("cpu_op") & trace.name_mask(classify.is_gloo)
    batches = classify.next_batches(trace) & (trace.duration_ns > READY_BATCH * step_ns)
    main = main_lane(trace)
    saves = trace.category_mask("python_function") & (trace.lane == main) & trace.name_mask(classify.is_save)
    return union_of(rows_of(trace, waits | collectives | batches | saves), collecting(trace, main))


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
    full: NDArray[np.bool_] = queued >= TUNING.nearly_full * QUEUED_LAUNCHES
    near_most = queued >= TUNING.nearly_full * most
    return full | near_most if most >= TUNING.fewest_queued and 2 * near_most.sum() >= len(queued) else full


def latent_idle(group: CycleGroup, times_ns: Array) -> Array:
    """[N, R] ns that each rank's device would wait for its host beyond what it does, if the rank waited for no other.

    By itself a rank needs the cycle without what it merely waits, and with the wait for data that hides there, but no less
    than its host needs to issue the step. Transfer beside which it would then work, as the slowest rank does, is no wait.
    """
    beside = 0.0 if group.beside_wait is None else group.beside_wait
    waits = np.nansum(group.wait - beside, axis=1)
    spent = group.work.sum(axis=(1, 3))
    if group.hidden is not None:
        waits = np.clip(waits - group.hidden[..., INDEX[Component.LAUNCH]].sum(axis=1), 0, None)
        spent = spent + group.hidden.sum(axis=(1, 3))
    idle = group.duration[:, None] - spent
    transfer = (idle - waits).min(axis=1, keepdims=True)
    alone = group.duration[:, None] - np.maximum(idle - transfer, 0.0)
    if LateCause.DATA in group.latent:
        data = group.work[..., INDEX[Component.DATA]].sum(axis=1)
        alone = alone + np.clip(group.latent[LateCause.DATA] - data, 0, None)
    more: Array = np.clip(np.nan_to_num(times_ns - alone), 0, None)
    return more


def with_issue_times(group: CycleGroup, times_ns: Array) -> CycleGroup:
    """The group with the hosts' issue times [R] ns, and the devices' idle time that hides in waits for other ranks."""
    timed = replace(group, issue_time_ns=np.minimum(np.nan_to_num(times_ns), group.duration[:, None]))
    more = latent_idle(timed, times_ns)
    if not more.any():
        return timed
    idle = group.work[..., _IDLE].sum(axis=(1, 3))
    return timed.with_latent(LateCause.HOST, idle + more)
