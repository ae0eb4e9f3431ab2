"""Jobs that reduce within their hosts first: ranks are in groups of their own, and do the same at the same place."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.measure.attribution import attribute
from ddpdoctor.measure.costs import Context, price_all
from ddpdoctor.measure.graph import Sync
from ddpdoctor.measure.taxonomy import SyncKind
from tests.generator import Config, Plant, generate
from tests.measure.made import NoLines, cycles_of, graph_of, late_of, on, work_array
from tests.measure.traced import accused, measured


def within_hosts_first(hosts, each, cycles=12, **components_ms):
    """Each host's ranks reduce among themselves, then all; the first time all work goes before."""
    world = hosts * each
    within = [
        Sync(SyncKind.GRADIENTS, "allreduce", tuple(range(first, first + each)), group=f"host {first}")
        for first in range(0, world, each)
    ]
    syncs = [*within, Sync(SyncKind.GRADIENTS, "allreduce", tuple(range(world)), group="all")]
    work = work_array(cycles, len(syncs), world, **components_ms)
    for k, sync in enumerate(syncs):
        outside = [rank for rank in range(world) if rank not in sync.members or k >= hosts]
        work[:, k, outside] = 0.0
    return graph_of(cycles_of(syncs, work))


@pytest.mark.parametrize(("hosts", "each"), [(2, 2), (3, 2), (4, 2), (3, 4)])
def test_what_all_ranks_do_is_common_to_them(hosts, each):
    graph = within_hosts_first(hosts, each, forward=10.0, host=4.0)
    costs = price_all(Context(graph, attribute(graph), NoLines(), mean_step_ms=graph.mean_cycle_ns / 1e6))
    assert costs["shared.host"].ms_per_step == pytest.approx(4.0, rel=0.01)


def test_what_one_host_s_ranks_do_is_not():
    mine = np.array([4.0, 4.0, 0.0, 0.0, 0.0, 0.0])
    graph = within_hosts_first(3, 2, forward=10.0, host=mine)
    costs = price_all(Context(graph, attribute(graph), NoLines(), mean_step_ms=graph.mean_cycle_ns / 1e6))
    assert "shared.host" not in costs or costs["shared.host"].ms_per_step < 0.01
    assert late_of(graph)["host"].ranks == [0, 1]


def test_the_rank_that_does_more_is_late_by_that():
    graph = within_hosts_first(3, 2, forward=10.0, host=0.5 + on(3, 6, 5.0)[:, 0, :])
    cost = late_of(graph)["host"]
    assert cost.ranks == [3] and cost.ms_per_step == pytest.approx(5.0, rel=0.01)


@pytest.mark.parametrize("hosts", [(2, 2), (2, 2, 2)])
def test_cycles_are_compared_whichever_host_reduced_first(hosts, tmp_path):
    """Which of two hosts is done first, chance decides anew in each step."""
    plant = Plant("host_gap_forward", ms=5.0)
    config = Config(world_size=sum(hosts), hosts=hosts, within_hosts_first=True, jitter=0.03, plants=(plant,))
    truth = generate(config, tmp_path)
    measurement = measured(tmp_path)
    assert len(measurement.graphs.primary.groups) == 1
    assert accused(measurement) == {}
    common = measurement.facts.shared.host
    assert common.ms_per_step == pytest.approx(truth.plants[0].cost_us_per_step / 1e3, rel=0.2)
