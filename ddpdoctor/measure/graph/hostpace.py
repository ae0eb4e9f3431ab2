"""How fast each rank's host issues its steps, also where its device does not stand idle for it.

Ranks meet in every step. Where all hosts are slower than their devices, only the slowest one's device is seen to wait for
launches: the other hosts, quicker by a hair, run ahead, their devices' idle time moves into the wait for that rank, and
mending it alone would gain that hair. What tells is what each host needs to issue a step,

    pace = length of the step on the host - time in which the host was blocked

which no rank can beat, whoever else is mended. Blocked is a host in a call that waits for the device, in a launch while the
launch queue is full, and in a collective on the CPU. Waiting for data, collecting garbage and saving have prices of their own
and do not count either. What remains is rather too little than too much: a host whose pace is not known accuses nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import Array, Intervals, covered, union
from ddpdoctor.measure.taxonomy import HOST_IDLE, INDEX
from ddpdoctor.measure.window import (
    DEVICE,
    QUEUED_LAUNCHES,
    Window,
    collecting,
    launch_pairs,
    main_lane,
    rows_of,
)
from ddpdoctor.trace import RankTrace, classify

from .graph import TAKING, CycleGroup

Ints = NDArray[np.int64]

_CALLS = ("cuda_runtime", "cuda_driver", "xpu_runtime")
_BLOCKED_NS = 100_000
"""A call of the runtime that takes longer waits for something: a launch takes some microseconds."""
_NEARLY_FULL = 0.8
"""Of the launch queue, or of the most that it held where it mostly holds nearly so much: then the device sets the pace."""
_FEWEST_QUEUED = 32
_FEWEST_STEPS = 2
_IDLE = [INDEX[component] for component in HOST_IDLE]


def host_paces(windows: Sequence[Window]) -> Array:
    """[R] ns that each rank's host needs to issue a step; NaN where unknown."""
    return np.array([pace_ns(window) for window in windows])


def pace_ns(window: Window) -> float:
    """ns that the host needs for a step: the mean or the median over the window's steps, whichever is less, so that a single
    pause does not count. NaN where less than two steps are marked or no launches were recorded."""
    trace = window.trace
    calls, events = launch_pairs(trace, trace.category_mask(*DEVICE))
    if not window.on_device or len(window.steps) < _FEWEST_STEPS or not len(calls):
        return float("nan")
    bounds = np.array([(start, end) for _, start, end in window.steps], np.int64) - window.shifted_ns
    blocked = _blocked(trace, float(np.median(bounds[:, 1] - bounds[:, 0])))
    starts, excess = _queued(trace, calls, events, blocked)
    needed = (bounds[:, 1] - bounds[:, 0]) - covered(blocked, bounds[:, 0], bounds[:, 1])
    before = np.concatenate(([0.0], np.cumsum(excess)))
    low, high = np.searchsorted(starts, bounds[:, 0]), np.searchsorted(starts, bounds[:, 1])
    needed -= before[high] - before[low]
    return max(0.0, float(min(needed.mean(), np.median(needed))))


def _blocked(trace: RankTrace, step_ns: float) -> Intervals:
    """When the host does not issue work: it waits, or does what is measured apart."""
    calls = trace.category_mask(*_CALLS)
    waits = calls & (trace.name_mask(classify.is_sync_call) | (trace.duration_ns > _BLOCKED_NS))
    apart = trace.category_mask("cpu_op") & trace.name_mask(classify.is_gloo)
    apart |= classify.next_batches(trace) & (trace.duration_ns > TAKING * step_ns)
    main = main_lane(trace)
    saved = trace.category_mask("python_function") & (trace.lane == main) & trace.name_mask(classify.is_save)
    found = [rows_of(trace, waits | apart | saved), collecting(trace, main)]
    return union(np.concatenate([start for start, _ in found]), np.concatenate([end for _, end in found]))


def _queued(trace: RankTrace, calls: Ints, events: Ints, blocked: Intervals) -> tuple[Ints, Array]:
    """(starts of the launches in order, ns before the end of each that a full queue may have cost): of the time since the
    launch before, what goes beyond the usual with room in the queue; all of it where there never was room."""
    order = np.argsort(trace.end_ns[calls], kind="stable")
    start, end = trace.start_ns[calls][order], trace.end_ns[calls][order]
    done = np.sort(trace.end_ns[trace.category_mask(*DEVICE)])
    # Device events without a launch in the trace were in the queue when the window began.
    unknown = len(done) - len(events)
    queued = unknown + np.arange(len(end)) - np.searchsorted(done, end)
    if not unknown:
        # Or were not recorded at all: until the first launch that is in the trace has run, as many as at that time.
        seen = int(np.searchsorted(end, trace.start_ns[events].min()))
        queued[:seen] = np.maximum(queued[:seen], queued[min(seen, len(queued) - 1)])
    since = np.concatenate(([0.0], np.diff(end).astype(float)))
    since[1:] -= covered(blocked, end[:-1], end[1:])
    most = int(queued.max())
    full = queued >= _NEARLY_FULL * QUEUED_LAUNCHES
    if most >= _FEWEST_QUEUED and 2 * (queued >= _NEARLY_FULL * most).sum() >= len(queued):
        full |= queued >= _NEARLY_FULL * most
    usual = float(since[~full].mean()) if (~full).any() else 0.0
    return start, np.where(full, np.clip(since - usual, 0.0, None), 0.0)


def latent_idle(group: CycleGroup, paces: Array) -> Array:
    """[N, R] ns that each rank's device would wait for its host beyond what it does, if the rank waited for no other.

    By itself a rank needs the cycle without what it merely waits, and with the wait for data that hides there, but no less
    than its host needs to issue the step. Transfer beside which it would then work, as the slowest rank does, is no wait.
    """
    beside = 0.0 if group.beside_wait is None else group.beside_wait
    waits = np.nansum(group.wait - beside, axis=1)
    spent = group.work.sum(axis=(1, 3))
    if group.hidden is not None:
        waits = np.clip(waits - group.hidden[..., INDEX["launch"]].sum(axis=1), 0, None)
        spent = spent + group.hidden.sum(axis=(1, 3))
    idle = group.duration[:, None] - spent
    transfer = (idle - waits).min(axis=1, keepdims=True)
    alone = group.duration[:, None] - np.maximum(idle - transfer, 0.0)
    if "data" in group.latent:
        alone = alone + np.clip(group.latent["data"] - group.work[..., INDEX["data"]].sum(axis=1), 0, None)
    more: Array = np.clip(np.nan_to_num(paces - alone), 0, None)
    return more


def with_pace(group: CycleGroup, paces: Array) -> CycleGroup:
    """The group with the hosts' paces [R] ns, and the devices' idle time that hides in waits for other ranks."""
    group = replace(group, pace=np.minimum(np.nan_to_num(paces), group.duration[:, None]))
    more = latent_idle(group, paces)
    if not more.any():
        return group
    idle = group.work[..., _IDLE].sum(axis=(1, 3))
    return group.with_latent("host", idle + more)
