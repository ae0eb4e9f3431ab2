"""The phases of training steps on a trace's host, and the gaps between them."""

from __future__ import annotations

import numpy as np

from ddpdoctor.measure.phases import Gap, Gaps, gaps_between
from ddpdoctor.measure.taxonomy import Component
from ddpdoctor.trace import RankTrace, classify

from .collectives import ENGINE
from .launches import rows_of

_BEFORE_FORWARD = (Component.DATA, Component.OPTIMIZER)
_USUAL_INSTEAD: dict[Gap, tuple[Gap, ...]] = {
    **{(before, Component.BACKWARD): ((before, Component.FORWARD),) for before in _BEFORE_FORWARD},
    (Component.FORWARD, Component.OPTIMIZER): ((Component.FORWARD, Component.BACKWARD),),
    **{
        (Component.BACKWARD, behind): (
            (Component.BACKWARD, Component.OPTIMIZER),
            (Component.OPTIMIZER, behind),
        )
        for behind in (Component.DATA, Component.FORWARD)
    },
}
"""A gap that leaves a phase out → those that there are where the phase is marked."""
_SELDOM = 0.5
"""Times those from which on phases are left out by the job, as the optimizer is where micro-batches are accumulated."""


def gaps_on_host(trace: RankTrace, main: int) -> Gaps:
    """The gaps between the phases of the training thread, on lane ``main``, and the backward passes of its engine's threads; none
    where the trace does not mark them all."""
    on_main = trace.lane == main
    annotated = trace.category_mask("cpu_op", "user_annotation")
    engine = annotated & trace.name_mask(lambda n: n.startswith(ENGINE))
    found = gaps_between(
        {
            Component.DATA: rows_of(trace, on_main & annotated & trace.name_mask(classify.is_dataloader)),
            Component.FORWARD: rows_of(trace, on_main & annotated & trace.name_mask(classify.is_ddp_forward)),
            Component.BACKWARD: rows_of(trace, engine),
            Component.OPTIMIZER: rows_of(
                trace, on_main & annotated & trace.name_mask(classify.is_optimizer_step)
            ),
        }
    )
    left_out = [place for place, gap in enumerate(found.kinds) if _is_none(gap, found)]
    kept = ~np.isin(found.kind, left_out)
    starts, ends = found.times
    return Gaps((starts[kept], ends[kept]), np.asarray(found.kind[kept]), found.kinds)


def _is_none(gap: Gap, found: Gaps) -> bool:
    """Whether it lies within a phase: a backward pass goes on between two functions of its engine, and a phase that is left out in
    a few steps only was there, but profilers drop events."""
    if gap == (Component.BACKWARD, Component.BACKWARD):
        return True
    usual = _USUAL_INSTEAD.get(gap)
    if usual is None:
        return False
    counts = np.bincount(found.kind, minlength=len(found.kinds))
    known = [counts[place] for place, other in enumerate(found.kinds) if other in usual]
    return bool(counts[found.kinds.index(gap)] < _SELDOM * max(known, default=0))
