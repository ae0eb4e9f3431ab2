"""Step times and batch sizes as facts."""

from __future__ import annotations

import numpy as np

from .facts import StepFacts
from .graph import Graph

SLOW_STEP = 1.5
"""A step is slow beyond this multiple of the median."""


def step_facts(graph: Graph) -> StepFacts:
    """Times of the measured cycles; sizes of the batches that the loaders gave."""
    seen = len({int(s) for steps in graph.steps for s in steps.steps})
    if not graph.groups:
        return StepFacts(source=graph.source, seen=seen)
    lengths = np.concatenate([group.duration for group in graph.groups])
    steps = np.concatenate([group.steps for group in graph.groups])
    samples = _samples(graph, {int(s) for s in steps})
    mean_ns = float(lengths.mean())
    per_step = float(samples.sum()) if samples is not None else None
    micro = _micro_batches(graph)
    return StepFacts(
        source=graph.source,
        seen=seen,
        measured=len(lengths),
        mean_ms=mean_ns / 1e6,
        median_ms=float(np.median(lengths)) / 1e6,
        p95_ms=float(np.quantile(lengths, 0.95)) / 1e6,
        samples_per_s=per_step / (mean_ns / 1e9) if per_step else None,
        batch_size=float(np.median(samples)) / max(micro or 1.0, 1.0) if samples is not None else None,
        batch_size_most=_most(samples),
        micro_batches=micro,
        slow_steps_share=float((lengths > SLOW_STEP * np.median(lengths)).mean()),
    )


def _samples(graph: Graph, measured: set[int]) -> np.ndarray | None:  # type: ignore[type-arg]
    """[R] mean samples per step; None where a rank's loader does not tell."""
    means = []
    for steps in graph.steps:
        known = [
            v
            for s, v in zip(steps.steps, steps.samples, strict=True)
            if int(s) in measured and not np.isnan(v)
        ]
        if not known:
            return None
        means.append(float(np.mean(known)))
    return np.array(means) if means else None


def _most(samples: np.ndarray | None) -> float | None:  # type: ignore[type-arg]
    if samples is None or len(samples) < 2 or not np.median(samples):
        return None
    leader = int(samples.argmax())
    others = float(np.median(np.delete(samples, leader)))
    return float(samples[leader]) / others if others else None


def _micro_batches(graph: Graph) -> float | None:
    values = [
        float(np.nanmedian(s.micro_batches)) for s in graph.steps if not np.isnan(s.micro_batches).all()
    ]
    found = float(np.median(values)) if values else 0.0
    return found or None
