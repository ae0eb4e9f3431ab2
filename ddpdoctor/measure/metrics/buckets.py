"""Facts about DDP's gradient buckets: settings, times from the step logs, and measurements from the window.

A reduction of gradients also costs time of the training thread before the last gradient is ready. On a CPU the reducer copies each
gradient into its bucket and issues each full bucket to the backend during the backward pass, on the thread that computes. A step log
counts that as computation. Without the reduction (``no_sync``) it disappears, and with fewer buckets issuing takes less time. The
profiler window shows how long it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from msgspec.structs import asdict, replace

from ddpdoctor.measure.facts import BucketFacts
from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.numerics import Ints, covered, holds, union_of
from ddpdoctor.measure.steplog import WARM_UP_STEPS, RankLog
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.measure.window import (
    ENGINE,
    UNKNOWN_STEP,
    Window,
    event_union,
    launched_inside,
    launches,
    main_lane,
    step_of_collectives,
)
from ddpdoctor.rundir.stepevents import EventKind
from ddpdoctor.trace import classify

from .communication import in_marked_steps, marked_steps

_MOST_COPY_SHARE = 0.1
"""Largest share of the time from the first to the last reduction of a step in which the device computes although the backward pass is
over: buckets are copied into their gradients."""


def backward_of(window: Window) -> tuple[float, float] | None:
    """Return the length of a backward pass in ms, and the share of it after which the first bucket starts; medians over the steps.

    The backward pass is the work that functions of the autograd engine launch; on a CPU, these functions themselves.
    """
    trace = window.trace
    engine = trace.category_mask("cpu_op") & trace.name_mask(lambda name: name.startswith(ENGINE))
    if not engine.any() or not window.steps:
        return None
    if window.on_device:
        # The device may run behind the host by more than a step: its kernels belong to the step that launched them.
        rows = np.flatnonzero(
            launched_inside(trace, event_union(trace, engine)) & ~classify.communication_kernels(trace)
        )
        calls = launches(trace, rows)
        rows, calls = rows[calls >= 0], calls[calls >= 0]
    else:
        rows = calls = np.flatnonzero(engine)
    host = trace.start_ns[calls] + window.shifted_ns
    reduced = np.flatnonzero(window.collectives.of_kind(SyncKind.GRADIENTS))
    lengths_ms, shares = [], []
    begins, ends = trace.start_ns[rows] + window.shifted_ns, trace.end_ns[rows] + window.shifted_ns
    of_steps = zip(
        _in_steps(window, host), _in_steps(window, window.collectives.issued[reduced]), strict=True
    )
    for own, issued in of_steps:
        if not len(own) or not len(issued):
            continue
        begin, stop = float(begins[own].min()), float(ends[own].max())
        lengths_ms.append((stop - begin) / 1e6)
        shares.append(
            (float(window.collectives.start[reduced[issued]].min()) - begin) / max(stop - begin, 1.0)
        )
    if not lengths_ms:
        return None
    return float(np.median(lengths_ms)), float(np.clip(np.median(shares), 0, 1))


def _in_steps(window: Window, at: Ints) -> Iterator[Ints]:
    """For each marked step, the indices of the host times in it."""
    order = np.argsort(at, kind="stable")
    bounds = np.array([(low, high) for _, low, high in window.steps], np.int64)
    for first, stop in np.searchsorted(at[order], bounds):
        yield order[first:stop]


def reduces_after_backward(window: Window) -> bool:
    """Return whether steps have several reductions of gradients with nearly no computation during or between them. Then the backward pass
    is over when the first one begins, which is known even if the trace lacks other events."""
    step = np.where(window.collectives.of_kind(SyncKind.GRADIENTS), step_of_collectives(window), UNKNOWN_STEP)
    order = np.argsort(step, kind="stable")
    numbers, first, count = np.unique(step[order], return_index=True, return_counts=True)
    several = (count > 1) & (numbers != UNKNOWN_STEP)
    if not window.steps or not several.any():
        return False
    begin = np.minimum.reduceat(window.collectives.start[order], first)[several]
    stop = np.maximum.reduceat(window.collectives.end[order], first)[several]
    shares = covered(window.compute, begin, stop) / np.maximum(stop - begin, 1)
    return float(np.median(shares)) <= _MOST_COPY_SHARE


_COPIES = "torch::distributed::reducer::"
"""Prefix of the names of the reducer's own copies (torch/csrc/distributed/c10d/reducer.cpp)."""
_ISSUES = ("c10d::allreduce_", "c10d::allreduce_coalesced_")
"""Operators that issue a bucket to the backend (torch/csrc/distributed/c10d/Ops.cpp)."""


class ReducerWork(msgspec.Struct, frozen=True):
    """Time that reductions cost the training thread of one rank; means over the window."""

    whole_ns: float
    """ns of copying and issuing in one backward pass, up to the rank's arrival (its last gradient)."""
    issue_ns: float
    """ns of issuing one bucket."""


def reducer_work(logs: Sequence[RankLog], windows: Sequence[Window]) -> list[ReducerWork | None]:
    """Return the reducer's work by position of the log; None for ranks whose window has no reduction, and for jobs on devices, whose hosts
    do this concurrently."""
    by_rank = {window.rank: window for window in windows if not window.on_device}
    return [_reducer_work_of_rank(log, by_rank[log.rank]) if log.rank in by_rank else None for log in logs]


def _reducer_work_of_rank(log: RankLog, window: Window) -> ReducerWork | None:
    passes = [
        (step.start_of(event), step.start_ns + event.gradients_ready_ns, step.end_of(event))
        for step in log.steps
        for event in step.events
        if event.kind == EventKind.BACKWARD
        and event.reductions
        and step.start_of(event) >= window.span[0]
        and step.end_of(event) <= window.span[1]
    ]
    if not passes:
        return None
    trace = window.trace
    own = trace.category_mask("cpu_op") & (trace.lane == main_lane(trace))
    copies = event_union(trace, own & trace.name_mask(lambda name: name.startswith(_COPIES)))
    issues = event_union(trace, own & trace.name_mask(lambda name: name in _ISSUES))
    start, arrival, stop = (np.array(times) for times in zip(*passes, strict=True))
    both = union_of(copies, issues)
    # Calls outside a backward pass are the script's own, such as for metrics.
    inside = holds((start, stop), issues[0])
    if not inside.any():
        return None
    return ReducerWork(
        whole_ns=float(covered(both, start, arrival).mean()),
        issue_ns=float((issues[1] - issues[0])[inside].mean()),
    )


_UNKNOWN_IF_0 = ("median_bytes", "backward_ms", "syncs_per_step")
"""Facts for which a 0 from the logs means unknown."""
_TIMES = ("backward_ms", "first_ready_share")
"""Facts on times of the backward pass."""


def bucket_facts(
    graph: Graph,
    log_graph: Graph | None,
    window_graph: Graph | None,
    logs: Sequence[RankLog],
    windows: Sequence[Window],
) -> BucketFacts:
    """Return the facts about gradient reduction from the logs, completed from the windows; ``graph`` is the primary one."""
    from_logs = _from_logs(logs, graph, log_graph or graph) if logs else BucketFacts()
    if window_graph is None:
        return from_logs
    # Backward passes with reduced gradients per optimizer step.
    counts = [
        len({sync.micro for sync in group.syncs if sync.kind == SyncKind.GRADIENTS})
        / max(1, len({sync.update for sync in group.syncs if sync.kind == SyncKind.GRADIENTS}))
        for group in window_graph.groups
    ]
    shown = _from_windows(windows, from_logs.syncs_per_step or max(counts, default=0.0) or 1.0)
    # The logs have the times at which the host issued the backward pass; a window has those of the device.
    on_device = any(window.on_device for window in windows)
    known = {
        name: value
        for name, value in asdict(from_logs).items()
        if (value or (value is not None and name not in _UNKNOWN_IF_0))
        and not (on_device and name in _TIMES and getattr(shown, name) is not None)
    }
    return replace(shown, **known)


def _from_logs(logs: Sequence[RankLog], graph: Graph, log_graph: Graph) -> BucketFacts:
    """Bucket sizes as DDP states them on the first rank, and how often gradients are reduced. A log has one reduction per backward pass,
    a window one per bucket."""
    modules = logs[0].record.info.get("ddp") or []
    sizes = [float(size) for ddp in modules for size in ddp.get("bucket_bytes") or []]
    cap = next((cap for ddp in modules if (cap := ddp.get("bucket_cap_bytes"))), None)
    # When each bucket was ready, in the backward passes after the warm-up that reduced gradients.
    passes_ns = [
        event.ready_ns
        for log in logs
        for step in log.steps[WARM_UP_STEPS:]
        for event in step.events
        if event.kind == EventKind.BACKWARD and event.synced and event.ready_ns
    ]
    # A job may have several modules, each reduced in a backward pass of its own.
    together = [
        len(event.reductions)
        for log in logs
        for step in log.steps
        for event in step.events
        if event.kind == EventKind.BACKWARD and event.reductions
    ]
    part = min(1.0, sum(together) / len(together) / len(modules)) if together and modules else 1.0
    largest = max((float(ddp.get("largest_parameter_bytes") or 0) for ddp in modules), default=0.0)
    shares = [ready_ns[0] / max(ready_ns) for ready_ns in passes_ns if max(ready_ns) > 0]
    tails_ns = [
        group.transfer[:, k]
        for group in graph.groups
        for k, sync in enumerate(group.syncs)
        if sync.kind == SyncKind.GRADIENTS
    ]
    return BucketFacts(
        per_sync=part * len(sizes) or None,
        median_bytes=float(np.median(sizes)) if sizes else None,
        total_bytes=part * sum(sizes) or None,
        cap_bytes=float(cap) if cap else None,
        largest_parameter_bytes=largest or None,
        backward_ms=float(np.median([max(ready_ns) for ready_ns in passes_ns])) / 1e6 if passes_ns else None,
        first_ready_share=float(np.median(shares)) if shares else None,
        tail_ms=float(np.mean(np.concatenate(tails_ns))) / 1e6 if tails_ns else None,
        syncs_per_step=_per_cycle(log_graph, SyncKind.GRADIENTS),
        barriers_per_step=_per_cycle(log_graph, SyncKind.BARRIER),
        collectives_per_step=_per_cycle(log_graph, SyncKind.COLLECTIVE),
    )


def _per_cycle(graph: Graph, kind: SyncKind) -> float | None:
    """Mean number of synchronisations of one kind per cycle; None without cycles."""
    counts = [sum(sync.kind == kind for sync in group.syncs) * len(group.steps) for group in graph.groups]
    return sum(counts) / graph.cycles if graph.cycles else None


def _from_windows(windows: Sequence[Window], syncs: float) -> BucketFacts:
    """Bucket facts from the windows; ``syncs``: backward passes with reduced gradients per step."""
    steps = marked_steps(windows)
    of_windows = [
        window.collectives.bytes[in_marked_steps(window) & window.collectives.of_kind(SyncKind.GRADIENTS)]
        for window in windows
    ]
    counts = [len(own) / steps for own in of_windows]
    sizes = [size for own in of_windows for size in own if size > 0]
    passes = [backward for window in windows if (backward := backward_of(window)) is not None]
    shares = [share for _, share in passes]
    if not shares and all(reduces_after_backward(window) for window in windows):
        shares = [1.0]
    return BucketFacts(
        per_sync=float(np.median(counts)) / syncs if any(counts) else None,
        median_bytes=float(np.median(sizes)) if sizes else None,
        total_bytes=float(np.sum(sizes)) / steps / len(windows) / syncs if sizes else None,
        backward_ms=float(np.median([length_ms for length_ms, _ in passes])) if passes else None,
        first_ready_share=float(np.median(shares)) if shares else None,
        syncs_per_step=syncs if any(counts) else None,
        barriers_per_step=_per_step(windows, SyncKind.BARRIER),
        collectives_per_step=_per_step(windows, SyncKind.COLLECTIVE),
    )


def _per_step(windows: Sequence[Window], kind: SyncKind) -> float:
    """Collectives of one kind in the whole window / number of marked steps, median rank."""
    return float(np.median([window.collectives.of_kind(kind).sum() for window in windows])) / marked_steps(
        windows
    )
