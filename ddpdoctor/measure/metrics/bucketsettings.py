"""DDP's buckets as it states them, and as the step logs show them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpdoctor.measure.facts import BucketFacts
from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.rundir import EventKind


def bucket_settings(logs: Sequence[RankLog], graph: Graph) -> BucketFacts:
    """Buckets as DDP states them, and how often gradients are reduced."""
    sizes: list[float] = []
    cap = None
    largest = 0.0
    for log in logs[:1]:
        for ddp in log.record.info.get("ddp") or []:
            sizes += [float(b) for b in ddp.get("bucket_bytes") or []]
            cap = cap or ddp.get("bucket_cap_bytes")
            largest = max(largest, float(ddp.get("largest_parameter_bytes") or 0))
    return BucketFacts(
        per_sync=float(len(sizes)) or None,
        median_bytes=float(np.median(sizes)) if sizes else None,
        total_bytes=float(sum(sizes)) or None,
        cap_bytes=float(cap) if cap else None,
        largest_parameter_bytes=largest or None,
        backward_ms=_backward_ms(logs),
        first_ready_share=_first_ready(logs),
        tail_ms=_tail_ms(graph),
        syncs_per_step=_per_cycle(graph, SyncKind.GRADIENTS),
        barriers_per_step=_per_cycle(graph, "barrier"),
        collectives_per_step=_per_cycle(graph, "collective"),
    )


def _per_cycle(graph: Graph, kind: str) -> float | None:
    counts = [(sum(s.kind == kind for s in group.syncs), len(group.steps)) for group in graph.groups]
    total = sum(n for _, n in counts)
    return sum(c * n for c, n in counts) / total if total else None


def _synced(logs: Sequence[RankLog]):  # type: ignore[no-untyped-def]
    for log in logs:
        for step in log.steps[3:]:
            for event in step.events:
                if event.kind == EventKind.BACKWARD and event.synced and event.ready_ns:
                    yield event


def _backward_ms(logs: Sequence[RankLog]) -> float | None:
    lengths = [max(event.ready_ns) for event in _synced(logs)]
    return float(np.median(lengths)) / 1e6 if lengths else None


def _first_ready(logs: Sequence[RankLog]) -> float | None:
    shares = [event.ready_ns[0] / max(event.ready_ns) for event in _synced(logs) if max(event.ready_ns) > 0]
    return float(np.median(shares)) if shares else None


def _tail_ms(graph: Graph) -> float | None:
    tails = [
        g.transfer[:, k] for g in graph.groups for k, s in enumerate(g.syncs) if s.kind == SyncKind.GRADIENTS
    ]
    return float(np.mean(np.concatenate(tails))) / 1e6 if tails else None
