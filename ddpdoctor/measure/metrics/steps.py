"""Step times and batch sizes as facts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpdoctor.measure.facts import StepFacts
from ddpdoctor.measure.graph import Graph, measured_steps, recorded_steps
from ddpdoctor.measure.numerics import Array, lasting

_APART = 1.1
"""Times the median that the mean may be without a word, where a few steps make the difference."""
_FEW = 100
"""One step in so many is few; up to three are, always."""
SLOW_STEP = 1.5
"""A step is slow beyond this multiple of the median."""


def step_facts(graph: Graph) -> StepFacts:
    """Times of the measured cycles; sizes of the batches that the loaders gave."""
    seen = len(recorded_steps(graph.steps) | measured_steps(graph.groups))
    if not graph.groups:
        return StepFacts(source=graph.source, seen=seen)
    lengths = np.concatenate([group.duration for group in graph.groups])
    steps = np.concatenate([group.steps for group in graph.groups])
    numbers = {int(s) for s in steps}
    samples = _means(graph, numbers, [of.samples for of in graph.steps])
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
        input_most=_most(_means(graph, numbers, [of.elements for of in graph.steps])),
        micro_batches=micro,
        slow_steps_share=float((lengths > SLOW_STEP * np.median(lengths)).mean()),
    )


def outstanding(graph: Graph) -> list[str]:
    """A sentence on the longest measured steps, where a few of them take most of the time."""
    steps = step_facts(graph)
    if steps.mean_ms is None or steps.median_ms is None:
        return []
    lengths = np.concatenate([group.duration for group in graph.groups])
    longer = np.sort(np.maximum(lengths - steps.median_ms * 1e6, 0.0))
    few = longer[-max(3, len(longer) // _FEW) :]
    apart = steps.mean_ms > _APART * steps.median_ms and few.sum() > longer.sum() / 2
    if not apart and steps.mean_ms <= max(steps.p95_ms or 0.0, SLOW_STEP * steps.median_ms):
        return []
    numbers = np.concatenate([group.steps for group in graph.groups])
    longest = ", ".join(f"{numbers[i]} ({lasting(float(lengths[i]))})" for i in np.argsort(-lengths)[:3])
    most = "most" if lengths.sum() < 2 * few.sum() else "much"
    return [f"A few steps take {most} of the time. The longest are {longest}."]


def _means(graph: Graph, measured: set[int], amounts: Sequence[Array | None]) -> Array | None:
    """[R] mean amount per measured step; ``amounts`` is, by rank, [N] one for each of its steps. None where a rank's is
    not known."""
    means = []
    for steps, values in zip(graph.steps, amounts, strict=True):
        if values is None:
            return None
        known = [
            v for s, v in zip(steps.steps, values, strict=True) if int(s) in measured and not np.isnan(v)
        ]
        if not known:
            return None
        means.append(float(np.mean(known)))
    return np.array(means) if means else None


def _most(samples: Array | None) -> float | None:
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
