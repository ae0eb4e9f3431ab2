"""Where a step's time goes: the parts of each rank and cycle add up to the cycle, the shares to one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from ddpdoctor.measure import caveats
from ddpdoctor.measure.graph import CycleGroup, Sync
from ddpdoctor.measure.metrics import critical_breakdown, cycle_breakdown, rank_breakdown
from ddpdoctor.measure.taxonomy import PARTS, SyncKind
from tests.measure.made import MS, cycles_of, graph_of, on, shared_of, simple, work_array
from tests.measure.replay.test_replay import random_graph


def of(values):
    return {part: value / MS for part, value in zip(PARTS, values, strict=True) if abs(value) > 1e-6}


@pytest.mark.parametrize("seed", range(6))
def test_parts_add_up_for_each_rank_and_cycle(seed):
    for group in random_graph(seed).groups:
        own = group.end[:, -1] - group.begin
        np.testing.assert_allclose(cycle_breakdown(group).sum(axis=2), own, rtol=0.01)


@pytest.mark.parametrize("seed", range(6))
def test_shares_of_the_critical_path_sum_to_one(seed):
    shares = critical_breakdown(random_graph(seed))
    assert sum(shares.values()) == pytest.approx(1.0) and min(shares.values()) >= 0.0
    assert shares["comm_wait"] == 0.0, "nobody waits on the critical path"


def test_each_component_has_its_part():
    work = {"data": 1.0, "epoch_start": 0.5, "copy": 0.25, "optimizer": 0.75, "collection": 0.125}
    work |= {"checkpoint": 3.0, "device_sync": 0.25, "launch": 0.5, "host": 1.5}
    graph = simple(2, transfer_ms=2.0, **work)
    wanted = {"data_wait": 1.5, "h2d": 0.25, "compute": 15.75, "comm_transfer": 2.0}
    wanted |= {"host": 2.375, "checkpoint": 3.0}
    for row in rank_breakdown(graph):
        assert of(row) == pytest.approx(wanted)


def test_wait_is_apart_from_transfer_and_from_barriers():
    everyone = (0, 1, 2)
    syncs = [Sync(SyncKind.BARRIER, "barrier", everyone), Sync(SyncKind.GRADIENTS, "allreduce", everyone)]
    late = np.stack([on(0, 3, 3.0)[0, 0], on(1, 3, 4.0)[0, 0]])[None]
    graph = graph_of(cycles_of(syncs, work_array(5, 2, 3, forward=1.0, host=late), transfer_ms=0.5))
    rows = [of(row) for row in rank_breakdown(graph)]
    assert rows[0] == pytest.approx(
        {"host": 3, "compute": 2, "barrier": 0.5, "comm_wait": 4, "comm_transfer": 0.5}
    )
    assert rows[1] == pytest.approx({"host": 4, "compute": 2, "barrier": 3.5, "comm_transfer": 0.5})
    assert rows[2] == pytest.approx({"compute": 2, "barrier": 3.5, "comm_wait": 4, "comm_transfer": 0.5})
    critical = critical_breakdown(graph)
    assert critical["host"] == pytest.approx(7 / 10) and critical["barrier"] == pytest.approx(0.5 / 10)


def test_the_critical_path_goes_through_the_late_rank():
    graph = simple(4, transfer_ms=2.0, data=on(3, 4, 13.0))
    shares = critical_breakdown(graph)
    assert shares["data_wait"] == pytest.approx(13 / 30) and shares["compute"] == pytest.approx(15 / 30)
    assert shares["comm_transfer"] == pytest.approx(2 / 30)


def test_much_of_a_step_is_unknown_only_where_the_critical_path_is():
    def notes(**work):
        return list(caveats._unattributed_time(SimpleNamespace(primary=simple(2, transfer_ms=2.0, **work))))

    assert not notes(collection=80.0, idle=on(1, 2, 0.01)), "garbage collection is known"
    assert not notes(data=on(0, 2, 30.0), idle=on(1, 2, 20.0)), "rank 0 sets the length of the step"
    (note,) = notes(idle=on(1, 2, 13.0))
    assert note.startswith("43 % of the step cannot be attributed") and "a device was idle" in note


def test_ranks_outside_a_synchronisation_keep_their_time():
    syncs = [Sync("model", "all_reduce", (0, 1)), Sync(SyncKind.GRADIENTS, "allreduce", (0, 1, 2))]
    work = work_array(4, 2, 3, forward=np.array([[3.0, 5.0, 0.0], [1.0, 1.0, 9.0]])[None])
    graph = graph_of(cycles_of(syncs, work, transfer_ms=1.0))
    rows = [of(row) for row in rank_breakdown(graph)]
    assert rows[2] == pytest.approx({"compute": 9.0, "comm_transfer": 1.0})
    assert rows[0] == pytest.approx({"compute": 4.0, "comm_wait": 4.0, "comm_transfer": 2.0})
    assert sum(critical_breakdown(graph).values()) == pytest.approx(1.0)


def test_communication_beside_computation_is_computation():
    """Rank 0 computes for 3 of the 4 ms in which it waits, and for 1 of the 2 ms of transfer; rank 1, the late one, for all of
    its transfer."""
    syncs = [Sync(SyncKind.GRADIENTS, "allreduce", (0, 1))]
    group = cycles_of(syncs, work_array(3, 1, 2, forward=np.array([[6.0, 10.0]])), transfer_ms=2.0)
    beside = np.broadcast_to(np.array([4.0, 2.0]) * MS, (3, 1, 2))
    waiting = np.broadcast_to(np.array([3.0, 0.0]) * MS, (3, 1, 2))
    graph = graph_of(
        replace(group, concurrent_compute=beside, concurrent_compute_in_wait=waiting, on_device=True)
    )
    rows = [of(row) for row in rank_breakdown(graph)]
    assert rows[0] == pytest.approx({"compute": 10.0, "comm_wait": 1.0, "comm_transfer": 1.0})
    assert rows[1] == pytest.approx({"compute": 12.0})
    assert critical_breakdown(graph)["compute"] == pytest.approx(1.0)


def test_collectives_at_the_same_time_are_counted_once():
    """Of two process groups: the second begins, and is over, while the first still runs."""
    syncs = [
        Sync(SyncKind.GRADIENTS, "allreduce", (0, 1), group="a"),
        Sync("model", "allreduce", (0, 1), group="b"),
    ]
    work = work_array(
        1, 2, 2, forward=np.array([[4.0, 4.0], [0.0, 0.0]])[None], host=[[[0.0, 0.0], [-3.0, -3.0]]]
    )
    at = np.ones((1, 1, 2)) * MS
    arrival, end = np.concatenate([4 * at, 6 * at], axis=1), np.concatenate([9 * at, 8 * at], axis=1)
    group = CycleGroup(
        tuple(syncs), np.array([0]), np.zeros((1, 2)), arrival, end, work, np.full((1, 2), np.nan)
    )
    for row in rank_breakdown(graph_of(group)):
        assert of(row) == pytest.approx({"compute": 4.0, "comm_transfer": 5.0})


def test_without_cycles_there_is_no_breakdown():
    graph = simple(2)
    graph.groups.clear()
    assert critical_breakdown(graph) == {} and not rank_breakdown(graph).any() and shared_of(graph) == {}
