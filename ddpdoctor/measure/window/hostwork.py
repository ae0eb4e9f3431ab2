"""Components of a rank without a device: the training thread's own operators."""

from __future__ import annotations

from collections.abc import Callable

from ddpdoctor.measure.numerics import Intervals, subtract, union_of
from ddpdoctor.measure.taxonomy import Component
from ddpdoctor.trace import RankTrace, classify

from .collectives import ENGINE
from .launches import rows_of
from .work import Work


def host_work(trace: RankTrace, main: int) -> Work:
    """What the training thread, on lane ``main``, computes: the data loader's and the optimizer's time first, then the
    backward pass's, and any other operator is the forward pass's."""
    on_main = trace.lane == main
    annotated = on_main & trace.category_mask("cpu_op", "user_annotation")

    def named(predicate: Callable[[str], bool]) -> Intervals:
        return rows_of(trace, annotated & trace.name_mask(predicate))

    data = named(classify.is_dataloader)
    optimizer = subtract(named(classify.is_optimizer_step), data)
    backward = subtract(named(lambda n: n.startswith(ENGINE)), optimizer)
    operators = on_main & trace.category_mask("cpu_op") & ~trace.name_mask(lambda n: n.startswith("c10d::"))
    rest = union_of(rows_of(trace, operators), named(classify.is_ddp_forward))
    forward = subtract(rest, union_of(data, optimizer, backward))
    sets: dict[str, Intervals] = {
        Component.DATA: data,
        Component.OPTIMIZER: optimizer,
        Component.BACKWARD: backward,
        Component.FORWARD: forward,
    }
    return Work(sets, compute=union_of(optimizer, backward, forward))
