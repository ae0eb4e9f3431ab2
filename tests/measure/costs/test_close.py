"""A price that hangs on whether computation waits for a collective is told with both."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.measure.attribution import attribute
from ddpdoctor.measure.costs import Context
from ddpdoctor.measure.graph import CycleGroup, Graph, Sync
from ddpdoctor.measure.replay import without_transfer
from ddpdoctor.measure.sourcelines import LogSourceLines
from ddpdoctor.measure.taxonomy import COMPONENTS

MS = 1e6


def cost_of_first_transfer(sure):
    """Of 3 ms of the first of two transfers of 4 ms, with 10 ms of computation before each; a computation that is ``sure``
    to wait for the first."""
    syncs = (Sync("gradients", "allgather", (0, 1)), Sync("gradients", "allgather", (0, 1)))
    both = np.ones((1, 1, 2)) * MS
    group = CycleGroup(
        syncs=syncs,
        steps=np.array([1]),
        begin=np.zeros((1, 2)),
        arrival=np.concatenate([both * 10, both * 24], axis=1),
        end=np.concatenate([both * 14, both * 28], axis=1),
        work=np.zeros((1, 2, 2, len(COMPONENTS))),
        message_bytes=np.full((1, 2), 1e6),
        on_device=True,
        dependency_probability=np.full((2, 2), sure),
    )
    graph = Graph(source="trace", ranks=(0, 1), groups=[group], steps=[], set_aside={})
    removed = [np.array([[3.0 * MS, 0.0]])]
    spent = [np.zeros((1, 2, 2))]
    context = Context(graph, attribute(graph), LogSourceLines([]))
    return context.cost([without_transfer(removed)], spent, where=[], operation="allgather")


@pytest.mark.parametrize(("sure", "ms"), [(0.0, 0.0), (1.0, 3.0)])
def test_what_is_clear_has_one_price(sure, ms):
    cost = cost_of_first_transfer(sure)
    assert cost.ms_per_step == pytest.approx(ms)
    assert (cost.waiting_ms_per_step, cost.going_on_ms_per_step) == (None, None)


def test_what_is_close_has_a_price_between_two_that_are_told():
    cost = cost_of_first_transfer(0.6)
    assert cost.ms_per_step == pytest.approx(1.8)
    assert (cost.waiting_ms_per_step, cost.going_on_ms_per_step) == pytest.approx((3.0, 0.0))
