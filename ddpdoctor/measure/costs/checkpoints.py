"""How often checkpoints come: as often as they were recorded, in whichever steps.

Few steps have one, and some of those are set aside, as the profiler or an evaluation disturbed them. What is measured says what a
checkpoint costs; how many there were, the step logs say of all steps
that were recorded in full.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ddpdoctor.measure.facts import Cost, scaled
from ddpdoctor.measure.numerics import Mask, persistence
from ddpdoctor.measure.steplog import settled_steps
from ddpdoctor.rundir import EventKind

from .context import Context


def as_often_as_saved(context: Context, cost: Cost) -> Cost:
    """What checkpoints cost, spread over all steps recorded in full but those of the warm-up. ``share`` then
    refers to the mean step with as many."""
    if context.graph.source != "step-log" or not context.logs:
        return cost
    settled = settled_steps(context.logs)
    numbers = np.array(list(settled), np.int64)
    saved: Mask = np.array(
        [
            any(event.kind == EventKind.SAVE for step in steps for event in step.events)
            for steps in settled.values()
        ],
        bool,
    )
    measured = np.isin(numbers, context.pricing.steps)
    if not (saved & measured).any():
        return cost
    factor = float(saved.mean() / saved[measured].mean())
    mean_ms = context.pricing.mean_ns / 1e6
    step_ms = mean_ms + (factor - 1.0) * cost.ms_per_step
    saved_ms = factor * mean_ms * (1.0 - 1.0 / cost.speedup)
    return msgspec.structs.replace(
        scaled(cost, factor, step_ms, also=("own_ms", "typical_ms")),
        speedup=step_ms / max(step_ms - saved_ms, 1e-3),
        **persistence(numbers, saved).as_facts(),
    )
