"""DDP's gradient buckets: what the module states, what the step logs timed, what the window shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.facts import BucketFacts
from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.steplog import WARM_UP_STEPS, Event, RankLog
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.measure.window import Window
from ddpdoctor.rundir import EventKind

from .backward import backward_of, reduces_behind
from .marked import in_marked_steps, marked_steps, of_kind


class Reductions(msgspec.Struct, frozen=True):
    """How the gradients are reduced: the facts of :class:`BucketFacts` that are measured, by the same names."""

    per_sync: float | None = None
    median_bytes: float | None = None
    total_bytes: float | None = None
    cap_bytes: float | None = None
    largest_parameter_bytes: float | None = None
    backward_ms: float | None = None
    first_ready_share: float | None = None
    tail_ms: float | None = None
    syncs_per_step: float | None = None
    barriers_per_step: float | None = None
    collectives_per_step: float | None = None


def bucket_facts(reductions: Reductions, favoured_cap_bytes: float | None) -> BucketFacts:
    """What was measured, and the bucket size that the prices of a message favour."""
    return BucketFacts(**msgspec.structs.asdict(reductions), favoured_cap_bytes=favoured_cap_bytes)


def reductions_of(
    graph: Graph,
    log_graph: Graph | None,
    window_graph: Graph | None,
    logs: Sequence[RankLog],
    windows: Sequence[Window],
) -> Reductions:
    """What the logs say of the buckets, completed by what the window shows; ``graph`` is the one that speaks for the job."""
    told = _told(logs, graph, log_graph or graph) if logs else Reductions()
    if window_graph is None:
        return told
    shown = _shown(windows, told.syncs_per_step or _syncs(window_graph))
    first_share = told.first_ready_share if told.first_ready_share is not None else shown.first_ready_share
    barriers = told.barriers_per_step if told.barriers_per_step is not None else shown.barriers_per_step
    calls = told.collectives_per_step if told.collectives_per_step is not None else shown.collectives_per_step
    return Reductions(
        per_sync=told.per_sync or shown.per_sync,
        median_bytes=told.median_bytes or shown.median_bytes,
        total_bytes=told.total_bytes or shown.total_bytes,
        cap_bytes=told.cap_bytes,
        largest_parameter_bytes=told.largest_parameter_bytes,
        backward_ms=told.backward_ms or shown.backward_ms,
        first_ready_share=first_share,
        tail_ms=told.tail_ms,
        syncs_per_step=told.syncs_per_step or shown.syncs_per_step,
        barriers_per_step=barriers,
        collectives_per_step=calls,
    )


def _told(logs: Sequence[RankLog], graph: Graph, log_graph: Graph) -> Reductions:
    """Buckets as DDP states them on the first rank, and when and how often gradients are reduced: in a log once for each backward
    pass, in a window once for each bucket."""
    modules = logs[0].record.info.get("ddp") or []
    sizes = [float(size) for ddp in modules for size in ddp.get("bucket_bytes") or []]
    cap = next((cap for ddp in modules if (cap := ddp.get("bucket_cap_bytes"))), None)
    largest = max((float(ddp.get("largest_parameter_bytes") or 0) for ddp in modules), default=0.0)
    return Reductions(
        per_sync=float(len(sizes)) or None,
        median_bytes=float(np.median(sizes)) if sizes else None,
        total_bytes=float(sum(sizes)) or None,
        cap_bytes=float(cap) if cap else None,
        largest_parameter_bytes=largest or None,
        backward_ms=_backward_ms(logs),
        first_ready_share=_first_ready_share(logs),
        tail_ms=_tail_ms(graph),
        syncs_per_step=_per_cycle(log_graph, SyncKind.GRADIENTS),
        barriers_per_step=_per_cycle(log_graph, SyncKind.BARRIER),
        collectives_per_step=_per_cycle(log_graph, SyncKind.COLLECTIVE),
    )


def _per_cycle(graph: Graph, kind: SyncKind) -> float | None:
    """Mean number of synchronisations of one kind."""
    counts = [sum(sync.kind == kind for sync in group.syncs) * len(group.steps) for group in graph.groups]
    return sum(counts) / graph.cycles if graph.cycles else None


def _reducing_backwards(logs: Sequence[RankLog]) -> Iterator[Event]:
    """Backward passes after the warm-up that reduced gradients and were told when each bucket was ready."""
    for log in logs:
        for step in log.steps[WARM_UP_STEPS:]:
            for event in step.events:
                if event.kind == EventKind.BACKWARD and event.synced and event.ready_ns:
                    yield event


def _backward_ms(logs: Sequence[RankLog]) -> float | None:
    lengths_ns = [max(event.ready_ns) for event in _reducing_backwards(logs)]
    return float(np.median(lengths_ns)) / 1e6 if lengths_ns else None


def _first_ready_share(logs: Sequence[RankLog]) -> float | None:
    shares = [
        event.ready_ns[0] / max(event.ready_ns)
        for event in _reducing_backwards(logs)
        if max(event.ready_ns) > 0
    ]
    return float(np.median(shares)) if shares else None


def _tail_ms(graph: Graph) -> float | None:
    tails_ns = [
        group.transfer[:, k]
        for group in graph.groups
        for k, sync in enumerate(group.syncs)
        if sync.kind == SyncKind.GRADIENTS
    ]
    return float(np.mean(np.concatenate(tails_ns))) / 1e6 if tails_ns else None


def _shown(windows: Sequence[Window], syncs: float) -> Reductions:
    """What the windows show, with so many reductions of all gradients in a step."""
    steps = marked_steps(windows)
    chosen = [in_marked_steps(window) & of_kind(window, SyncKind.GRADIENTS) for window in windows]
    counts = [float(rows.sum()) / steps for rows in chosen]
    sizes = [
        size
        for window, rows in zip(windows, chosen, strict=True)
        for size in window.collectives.bytes[rows]
        if size > 0
    ]
    passes = [backward for window in windows if (backward := backward_of(window)) is not None]
    shares = [share for _, share in passes]
    if not shares and all(reduces_behind(window) for window in windows):
        shares = [1.0]
    return Reductions(
        per_sync=float(np.median(counts)) / syncs if any(counts) else None,
        median_bytes=float(np.median(sizes)) if sizes else None,
        total_bytes=float(np.sum(sizes)) / steps / len(windows) / syncs if sizes else None,
        backward_ms=float(np.median([length_ms for length_ms, _ in passes])) if passes else None,
        first_ready_share=float(np.median(shares)) if shares else None,
        syncs_per_step=syncs if any(counts) else None,
        barriers_per_step=_per_step(windows, SyncKind.BARRIER),
        collectives_per_step=_per_step(windows, SyncKind.COLLECTIVE),
    )


def _syncs(graph: Graph) -> float:
    """Backward passes whose gradients were reduced, for each step of an optimizer."""
    counts = [
        len({sync.micro for sync in group.syncs if sync.kind == SyncKind.GRADIENTS})
        / max(1, len({sync.update for sync in group.syncs if sync.kind == SyncKind.GRADIENTS}))
        for group in graph.groups
    ]
    return float(max(counts, default=0.0)) or 1.0


def _per_step(windows: Sequence[Window], kind: SyncKind) -> float:
    """Collectives of one kind in the whole window over the marked steps, median rank."""
    return float(np.median([of_kind(window, kind).sum() for window in windows])) / marked_steps(windows)
