"""Evaluations by some ranks alone, for which the others wait: a stall of training in steps that are set aside.

A step in which the job evaluates is not measured, its length says nothing of training. Yet where rank 0 goes through the
whole validation set by itself, all other ranks stand still as long, and dividing the set would give most of that back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ddpdoctor.measure.facts import Cost, Where
from ddpdoctor.measure.numerics import persistence
from ddpdoctor.measure.sourcelines import Frame, ranked
from ddpdoctor.measure.steplog import RankLog, Step, evaluates, main_loaders, undisturbed
from ddpdoctor.rundir import EventKind


def lone_evaluation(logs: Sequence[RankLog], mean_ms: float | None) -> Cost | None:
    """What it costs that at most half of the ranks evaluate, the same ones; None where that does not happen.

    ``ms_per_step`` is what is saved where the E ranks that evaluate share the work with all W: (W - E) / W of the time by
    which the steps with an evaluation are longer than the median of the others, spread over all steps but those of the
    warm-up and those that the profiler disturbed. ``share`` refers to ``mean_ms`` (of steps without evaluation) with that
    time.
    """
    if len(logs) < 2 or not mean_ms:
        return None
    main = main_loaders(logs)
    together = undisturbed(logs)
    lengths, who = [], []
    for _, steps in together:
        evaluating = [r for r, step in enumerate(steps) if evaluates(step, main[r])]
        lengths.append(
            float(np.median([steps[r].end - steps[r].start for r in evaluating or range(len(steps))]))
        )
        who.append(tuple(evaluating))
    alone = Counter(ranks for ranks in who if ranks and 2 * len(ranks) <= len(logs))
    usual = [length for length, ranks in zip(lengths, who, strict=True) if not ranks]
    if not alone or not usual:
        return None
    chosen = alone.most_common(1)[0][0]
    hit = np.array([ranks == chosen for ranks in who])
    longer = np.where(hit, np.clip(np.array(lengths) - np.median(usual), 0, None), 0.0)
    extra_ms = float(longer.mean()) / 1e6
    saved_ms = extra_ms * (len(logs) - len(chosen)) / len(logs)
    length_ms = mean_ms + extra_ms
    if not saved_ms:
        return None
    numbers = np.array([number for number, _ in together])
    steps_of = [
        [steps[r] for (_, steps), is_one in zip(together, hit, strict=True) if is_one] for r in chosen
    ]
    return Cost(
        ms_per_step=saved_ms,
        share=saved_ms / length_ms,
        speedup=length_ms / (length_ms - saved_ms),
        ranks=[logs[r].rank for r in chosen],
        own_ms=extra_ms,
        occurrence_ms=float(np.median(longer[hit])) / 1e6,
        **persistence(numbers, hit).as_facts(),
        where=_lines([logs[r] for r in chosen], steps_of, [main[r] for r in chosen]),
    )


def _lines(
    logs: Sequence[RankLog], steps_of: Sequence[Sequence[Step]], main: Sequence[set[int]]
) -> list[Where]:
    """Lines that take the batches of these evaluations, or call the module, most frequent first."""
    found: Counter[Frame] = Counter()
    for log, steps, loaders in zip(logs, steps_of, main, strict=True):
        for step in steps:
            for event in step.events:
                where = log.where.get(event.where)
                if where is not None and (
                    event.kind == EventKind.EVALUATION
                    or (event.kind == EventKind.DATA and event.loader not in loaders)
                ):
                    found[Frame(where.file, where.line, where.function)] += 1
    return ranked(found)
