"""The phases of training steps on a trace's host, and the gaps between them."""

from __future__ import annotations

import numpy as np

from ddpdoctor.measure.phases import Gaps, gaps_between
from ddpdoctor.measure.taxonomy import Component
from ddpdoctor.trace import RankTrace, classify

from .collectives import ENGINE
from .launches import rows_of


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
    # Between two functions of its engine a backward pass goes on.
    within = (Component.BACKWARD, Component.BACKWARD)
    if within not in found.kinds:
        return found
    kept = found.kind != found.kinds.index(within)
    starts, ends = found.times
    return Gaps((starts[kept], ends[kept]), np.asarray(found.kind[kept]), found.kinds)
