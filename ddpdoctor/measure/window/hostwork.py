"""Components of a rank without a device: the training thread's own operators."""

from __future__ import annotations

from collections.abc import Callable

from ddpdoctor.measure.numerics import Intervals, intersect, subtract, union_of
from ddpdoctor.measure.taxonomy import IN_GAPS, Component
from ddpdoctor.trace import RankTrace, classify

from .collectives import ENGINE
from .hostphases import gaps_on_host
from .launches import rows_of
from .work import Work


def host_work(trace: RankTrace, main: int) -> Work:
    """What the training thread, on lane ``main``, computes: the data loader's and the optimizer's time first, then the
    backward pass's, what runs between the phases, and any other operator is the forward pass's."""
    on_main = trace.lane == main
    annotated = on_main & trace.category_mask("cpu_op", "user_annotation")

    def named(predicate: Callable[[str], bool]) -> Intervals:
        return rows_of(trace, annotated & trace.name_mask(predicate))

    data = named(classify.is_dataloader)
    optimizer = subtract(named(classify.is_optimizer_step), data)
    backward = subtract(named(lambda n: n.startswith(ENGINE)), optimizer)
    operators = on_main & trace.category_mask("cpu_op") & ~trace.name_mask(lambda n: n.startswith("c10d::"))
    rest = union_of(rows_of(trace, operators), named(classify.is_ddp_forward))
    computing = subtract(rest, union_of(data, optimizer, backward))
    gaps = gaps_on_host(trace, main)
    between: dict[str, Intervals] = {
        component: intersect(computing, gaps.of(component)) for component in IN_GAPS
    }
    forward = subtract(computing, union_of(*between.values()))
    sets: dict[str, Intervals] = {
        Component.DATA: data,
        Component.OPTIMIZER: optimizer,
        Component.BACKWARD: backward,
        Component.FORWARD: forward,
        **between,
    }
    in_gaps = {gap: gaps.among([gap]) for gap in gaps.kinds}
    return Work(sets, compute=union_of(optimizer, backward, computing), in_gaps=in_gaps)
