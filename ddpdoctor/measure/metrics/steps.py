"""Facts about step times and batch sizes, and what ddpdoctor's profiler window cost the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.facts import StepFacts
from ddpdoctor.measure.graph import Graph, measured_steps
from ddpdoctor.measure.numerics import Array, format_duration
from ddpdoctor.measure.steplog import (
    AROUND_WINDOW,
    OPENED,
    PROFILED,
    SUSPENDED,
    RankLog,
    longest_ns,
    recorded_everywhere,
)
from ddpdoctor.measure.summary import WindowCost


class Tuning(msgspec.Struct, frozen=True):
    """When long steps get a note."""

    apart: float = 1.1
    """Ratio of mean to median above which there is a note if a few steps make the difference."""
    slow: float = 1.5
    """Ratio of mean to median above which there is a note in any case."""
    few: int = 100
    """Few steps are one in this many."""
    always_few: int = 3
    """Or this many in a short run, and so many are named."""


_TUNING = Tuning()


def step_facts(
    graph: Graph, seen: int, operators_seen: bool, input_explains: float | None, world_size: int | None
) -> StepFacts:
    """Times of the measured cycles; sizes of the batches that the loaders gave.

    ``graph``: the one for step times; ``seen``: number of recorded steps; ``operators_seen`` and ``input_explains`` are the facts of
    these names. Totals over all ranks are unknown where one of ``world_size`` is missing.
    """
    if not graph.groups:
        return StepFacts(
            source=graph.source, seen=seen, operators_seen=operators_seen, input_explains=input_explains
        )
    lengths_ns = graph.lengths_ns
    mean_ns, median_ns = float(lengths_ns.mean()), float(np.median(lengths_ns))
    samples = _means(graph, [steps.samples for steps in graph.steps])
    whole = world_size is None or len(graph.ranks) >= world_size
    per_step = float(samples.sum()) if samples is not None and whole else None
    micro_batches = _micro_batches(graph)
    return StepFacts(
        source=graph.source,
        seen=seen,
        measured=len(lengths_ns),
        mean_ms=mean_ns / 1e6,
        median_ms=median_ns / 1e6,
        p95_ms=float(np.quantile(lengths_ns, 0.95)) / 1e6,
        samples_per_s=per_step / (mean_ns / 1e9) if per_step else None,
        batch_size=float(np.median(samples)) / max(micro_batches or 1.0, 1.0)
        if samples is not None
        else None,
        batch_size_most=_most(samples),
        input_most=_most(_means(graph, [steps.elements for steps in graph.steps])),
        micro_batches=micro_batches,
        input_explains=input_explains,
        marked=any(len(steps.steps) for steps in graph.steps),
        operators_seen=operators_seen,
    )


def longest_steps_note(graph: Graph) -> list[str]:
    """A note on the longest measured steps, where a few of them take most of the time."""
    if not graph.groups:
        return []
    lengths_ns = graph.lengths_ns
    mean_ns, median_ns = float(lengths_ns.mean()), float(np.median(lengths_ns))
    beyond_ns = np.sort(np.maximum(lengths_ns - median_ns, 0.0))
    few = max(_TUNING.always_few, len(beyond_ns) // _TUNING.few)
    of_few_ns = float(beyond_ns[-few:].sum())
    apart = mean_ns > _TUNING.apart * median_ns and of_few_ns > beyond_ns.sum() / 2
    if not apart and mean_ns <= max(float(np.quantile(lengths_ns, 0.95)), _TUNING.slow * median_ns):
        return []
    order = np.argsort(-lengths_ns, kind="stable")[: _TUNING.always_few]
    order = order[lengths_ns[order] > _TUNING.apart * median_ns]
    longest = ", ".join(f"{graph.numbers[i]} ({format_duration(float(lengths_ns[i]))})" for i in order)
    most = "most" if lengths_ns.sum() < 2 * of_few_ns else "much"
    steps = "The longest are" if len(order) > 1 else "The longest is"
    return [f"A few steps take {most} of the time. {steps} {longest}."]


def _means(graph: Graph, amounts: Sequence[Array | None]) -> Array | None:
    """[R] mean amount per measured step; ``amounts``: for each rank, [N] values of its steps. None where a rank has none."""
    measured = list(measured_steps(graph.groups))
    means = []
    for steps, values in zip(graph.steps, amounts, strict=True):
        if values is None:
            return None
        known = values[np.isin(steps.steps, measured) & ~np.isnan(values)]
        if not len(known):
            return None
        means.append(float(np.mean(known)))
    return np.array(means) if means else None


def _most(amounts: Array | None) -> float | None:
    """Largest rank's amount / median of the other ranks."""
    if amounts is None or len(amounts) < 2 or not np.median(amounts):
        return None
    leader = int(amounts.argmax())
    others = float(np.median(np.delete(amounts, leader)))
    return float(amounts[leader]) / others if others else None


def _micro_batches(graph: Graph) -> float | None:
    """Backward passes per step, median over the steps and ranks; None where no rank recorded any."""
    medians = [
        float(np.nanmedian(steps.micro_batches))
        for steps in graph.steps
        if not np.isnan(steps.micro_batches).all()
    ]
    return (float(np.median(medians)) or None) if medians else None


def window_cost(logs: Sequence[RankLog], usual_ms: float | None) -> WindowCost | None:
    """Cost of the window in steps that all ranks recorded, each as long as its longest rank's, relative to a usual one of ``usual_ms``.
    None where no window was open, or the usual step time is unknown."""
    everywhere = recorded_everywhere(logs)
    length = {number: longest_ns(steps) / 1e6 for number, steps in everywhere.items()}
    marks = {number: {mark for step in steps for mark in step.marks} for number, steps in everywhere.items()}
    inside = _first_window([n for n in everywhere if PROFILED in marks[n]], marks)
    if usual_ms is None or not inside:
        return None
    # Kernels and threads of the profiler end in the step after the one that opens, closes or saves it.
    around = {n + later for n in everywhere if marks[n].intersection(AROUND_WINDOW) for later in (0, 1)}
    stopped = {n + later for n in everywhere if SUSPENDED in marks[n] for later in (0, 1)}
    touched = around.intersection(everywhere).union(inside) - stopped
    captures = [n for n in everywhere if n > inside[-1] and OPENED in marks[n]]
    touched = {n for n in touched if not captures or n < captures[0]}
    quiet = [n for n in inside if OPENED not in marks[n]] or inside
    return WindowCost(
        first=inside[0],
        last=inside[-1],
        step_ms=float(np.median([length[n] for n in quiet])),
        extra_ms=max(0.0, sum(length[n] - usual_ms for n in touched)),
    )


def _first_window(profiled: Sequence[int], marks: Mapping[int, set[str]]) -> list[int]:
    """The profiled steps before a window that a user requested during the run, whose cost does not count."""
    later = [n for n in profiled[1:] if OPENED in marks[n]]
    return [n for n in profiled if not later or n < later[0]]
