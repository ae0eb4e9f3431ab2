"""Slow links: named where like groups can be compared, left open where not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddpdoctor.measure.graph import Sync
from ddpdoctor.measure.metrics import slow_link_ranks
from ddpdoctor.measure.taxonomy import SyncKind
from tests.generator import SMALL, Config, Plant, generate
from tests.measure.made import cycles_of, graph_of, shared_of, simple, work_array
from tests.measure.traced import accused, measured

MESH = Config(world_size=8, tensor_parallel=2, steps=4, **SMALL)


@pytest.mark.parametrize(
    ("plants", "expected"),
    [
        ((), []),
        ((Plant("slow_link", ranks=(4,), factor=3.0),), [4]),
        ((Plant("slow_data", ranks=(4,), ms=3.0),), []),
    ],
    ids=["healthy", "one slow link", "late for another reason"],
)
def test_groups_of_a_mesh_are_compared(plants, expected, tmp_path):
    generate(replace(MESH, plants=plants), tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert measurement.facts.communication.slow_link_ranks == expected
    if plants and plants[0].kind == "slow_link":
        assert accused(measurement) == {}


@pytest.mark.parametrize(("slow", "expected"), [(1.0, []), (2.0, [2, 3])], ids=["healthy", "slow link"])
@pytest.mark.parametrize("backward_ms", [(10.0, 10.0), (10.0, 14.0)], ids=["replicas", "other stages"])
@pytest.mark.parametrize("steps", [8, 2])
def test_groups_are_compared_by_place_where_no_size_was_recorded(slow, expected, backward_ms, steps):
    """Two groups of two ranks, two reductions each; only replicas of one model are known to exchange the same."""
    syncs = [
        Sync(SyncKind.GRADIENTS, "allreduce", members, group=f"data{members[0]}")
        for _ in range(2)
        for members in ((0, 1), (2, 3))
    ]
    work = work_array(steps, 4, 4, backward=np.repeat(backward_ms, 2) / 4)
    graph = graph_of(cycles_of(syncs, work, np.array([2.0, 2.0 * slow, 2.0, 2.0 * slow])))
    compared = backward_ms[0] == backward_ms[1]
    assert slow_link_ranks(graph, [""] * 4) == (expected if compared else None)


@pytest.mark.parametrize("steps", [8, 2])
def test_a_single_longer_message_of_unknown_size_is_no_slow_link(steps):
    """Two groups, three reductions each, of which one differs: over a slow link all would take longer."""
    syncs = [
        Sync(SyncKind.GRADIENTS, "allreduce", members, group=f"data{members[0]}")
        for _ in range(3)
        for members in ((0, 1), (2, 3))
    ]
    work = work_array(steps, 6, 4, backward=2.5)
    graph = graph_of(cycles_of(syncs, work, np.array([2.0, 4.0, 2.0, 2.0, 2.0, 2.0])))
    assert slow_link_ranks(graph, [""] * 4) == []


def test_sizes_that_occur_twice_are_compared_together(tmp_path):
    """In a window of two steps no size has three transfers."""
    plants = (Plant("slow_link", ranks=(4,), factor=3.0),)
    generate(replace(MESH, plants=plants, steps=2), tmp_path / "traces")
    assert measured(tmp_path / "traces").facts.communication.slow_link_ranks == [4]


def test_one_group_of_all_ranks_leaves_it_open(tmp_path):
    plants = (Plant("slow_link", factor=3.0),)
    generate(Config(steps=3, plants=plants, **SMALL), tmp_path / "traces")
    assert measured(tmp_path / "traces").facts.communication.slow_link_ranks is None


def test_without_collectives_of_known_size_nothing_is_compared():
    assert slow_link_ranks(simple(4), [""] * 4) is None


@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_ranks_wait_for_a_cpu(world):
    graph = graph_of(simple(world).groups[0], run_delay_ms=[3.0, 3.5, 4.0, 3.2][:world])
    cost = shared_of(graph)["cpu_starved"]
    assert cost.ranks is None and cost.ms_per_step == pytest.approx(3.1, abs=0.15)


def test_one_rank_that_waits_for_a_cpu_is_not_common():
    graph = graph_of(simple(4).groups[0], run_delay_ms=[0.0, 0.0, 5.0, 0.0])
    assert "cpu_starved" not in shared_of(graph)
