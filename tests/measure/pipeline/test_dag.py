"""Replay of a dependency graph: against sums by hand, against the definition written out, and against the
replay of data-parallel cycles, which is a special case."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.errors import UnusableInput
from ddpdoctor.measure.graph import Sync
from ddpdoctor.measure.pipeline import ALONE, Costs, build_dag, measured_costs, order_edges, replay
from ddpdoctor.measure.replay import baseline
from ddpdoctor.measure.replay import replay as replay_cycles
from ddpdoctor.measure.taxonomy import SyncKind
from tests.measure.made import cycles_of, work_array


def edges(*pairs):
    before, after = zip(*pairs, strict=True)
    return np.array(before), np.array(after)


def test_a_collective_ends_for_all_when_the_last_has_come():
    # Rank 0: compute 10, all-reduce, optimizer 1; rank 1: compute 30, all-reduce, optimizer 2.
    dag = build_dag(6, [edges((0, 1), (1, 2), (3, 4), (4, 5))], np.array([-1, 0, -1, -1, 0, -1]))
    costs = Costs(np.zeros(6), np.array([10.0, 5, 1, 30, 5, 2]))
    start, end = replay(dag, np.zeros(6), costs)
    assert start.tolist() == [0, 10, 35, 0, 30, 35]
    assert end.tolist() == [10, 35, 36, 30, 35, 37]
    spent = measured_costs(dag, np.zeros(6), start, end)
    assert spent.delay.tolist() == costs.delay.tolist()
    assert spent.work.tolist() == costs.work.tolist()
    rank_1_on_time = Costs(costs.delay, np.array([10.0, 5, 1, 10, 5, 2]))
    assert replay(dag, np.zeros(6), rank_1_on_time)[1].max() == 17


def test_streams_are_chained_in_the_order_of_their_keys():
    stream = np.array([7, 3, 7, ALONE, 3, 7])
    start = np.array([2.0, 0, 1, 5, 0, 2])
    tie = np.array([1, 1, 0, 0, 0, 0])
    before, after = order_edges(stream, start, tie)
    assert sorted(zip(before.tolist(), after.tolist(), strict=True)) == [(2, 5), (4, 1), (5, 0)]


def by_definition(size, pairs, collective, origin, costs):
    """Start and end by the formulas, operation by operation, again and again until nothing moves."""
    start, end = np.full(size, -np.inf), np.full(size, -np.inf)
    for _ in range(size + 1):
        for v in range(size):
            ready = max([origin[v], *(end[u] for u, w in pairs if w == v)])
            start[v] = ready + costs.delay[v]
        for v in range(size):
            members = [v] if collective[v] == ALONE else np.flatnonzero(collective == collective[v])
            end[v] = max(start[m] for m in members) + costs.work[v]
    return start, end


@pytest.mark.parametrize("seed", range(8))
def test_random_graphs_replay_as_defined(seed):
    random = np.random.default_rng(seed)
    # Layers of operations, so that collectives within a layer never wait for each other.
    layer = np.sort(random.integers(0, 6, 40))
    pairs = [(u, v) for u in range(40) for v in range(40) if layer[u] < layer[v] and random.random() < 0.08]
    collective = np.where(random.random(40) < 0.5, layer * 2 + random.integers(0, 2, 40), ALONE)
    shuffled = random.permutation(40)
    pairs = [(shuffled[u], shuffled[v]) for u, v in pairs]
    mixed = np.empty(40, np.int64)
    mixed[shuffled] = collective
    origin, costs = random.uniform(0, 5, 40), Costs(random.uniform(0, 1, 40), random.uniform(0, 9, 40))
    dag = build_dag(40, [edges(*pairs)], mixed)
    start, end = replay(dag, origin, costs)
    expected = by_definition(40, pairs, mixed, origin, costs)
    np.testing.assert_allclose([start, end], expected)
    spent = measured_costs(dag, origin, start, end)
    np.testing.assert_allclose(spent.delay, costs.delay, atol=1e-12)
    np.testing.assert_allclose(spent.work, costs.work, atol=1e-12)


def test_clocks_that_disagree_cancel_within_the_tolerance_only():
    dag = build_dag(2, [edges((0, 1))], np.array([ALONE, ALONE]))
    start, end = np.array([0.0, 9.0]), np.array([10.0, 12.0])
    kept = measured_costs(dag, np.zeros(2), start, end, tolerance=2.0)
    assert kept.delay.tolist() == [0, -1]
    assert replay(dag, np.zeros(2), kept)[1].tolist() == end.tolist()
    assert measured_costs(dag, np.zeros(2), start, end, tolerance=0.5).delay.tolist() == [0, 0]


@pytest.mark.parametrize("collective", [[ALONE, ALONE, ALONE], [0, ALONE, 0]])
def test_a_circle_is_refused(collective):
    # In the second case operation 1 waits for one member of a collective and the other member for it.
    pairs = [(0, 1), (1, 2)] + ([(2, 0)] if collective[0] == ALONE else [])
    with pytest.raises(UnusableInput, match="in a circle"):
        build_dag(3, [edges(*pairs)], np.array(collective))


def test_nothing_is_replayed_to_nothing():
    dag = build_dag(0, [], np.empty(0, np.int64))
    start, end = replay(dag, np.empty(0), Costs(np.empty(0), np.empty(0)))
    assert (start.size, end.size) == (0, 0)


@pytest.mark.parametrize("changed", [False, True])
def test_cycles_of_data_parallel_jobs_are_a_special_case(changed):
    random = np.random.default_rng(3)
    syncs = [
        Sync(SyncKind.COLLECTIVE, "all_reduce", (0, 1, 3)),
        Sync(SyncKind.BARRIER, "barrier", (0, 1, 2, 3)),
        Sync(SyncKind.GRADIENTS, "DDP gradients", (0, 1, 2, 3)),
    ]
    work = work_array(1, 3, 4, backward=random.uniform(0, 9, (1, 3, 4)))
    group = cycles_of(syncs, work, random.uniform(0.5, 4, (1, 3)))
    scenario = baseline(group)
    if changed:
        scenario.removed[:, :, 2] = 0.9 * work.sum(axis=3)[:, :, 2]
        scenario.transfer *= 3
    # One operation for each synchronisation and member: its delay is the work before it.
    parts = [(k, r) for k, sync in enumerate(syncs) for r in sync.members]
    rank = np.array([r for _, r in parts])
    number = np.array([k for k, _ in parts])
    dag = build_dag(len(parts), [order_edges(rank, number)], number)
    costs = Costs((work.sum(axis=3) - scenario.removed)[0, number, rank], scenario.transfer[0, number])
    _, end = replay(dag, group.begin[0, rank], costs)
    length = end[number == 2].max() - group.begin[0].max()
    assert length == pytest.approx(replay_cycles(group, scenario)[0], rel=1e-12)
