"""What-if by replay: with nothing changed it is the measured job; with a known delay out it gains that delay."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from ddpdoctor.measure.graph import Sync
from ddpdoctor.measure.replay import (
    baseline,
    place_removed_work,
    replay,
    replay_all,
    without_sync,
    without_transfer,
    without_work,
)
from ddpdoctor.measure.taxonomy import INDEX, SyncKind
from tests.measure.made import MS, cycles_of, gain_ns, graph_of, on, reductions, shared_of, simple, work_array


def of_component(graph, name):
    return [group.work[..., INDEX[name]] for group in graph.groups]


def random_graph(seed, world=5):
    """Groups of ranks, roots, lags and transfers at random; the cycle ends with all."""
    random = np.random.default_rng(seed)
    everyone = tuple(range(world))
    syncs = [
        Sync(SyncKind.COLLECTIVE, "all_reduce", (0, 1, 3)),
        Sync(SyncKind.BROADCAST, "DDP buffers", everyone, root=0),
        Sync(SyncKind.COLLECTIVE, "all_gather", (2, 4)),
        Sync(SyncKind.BARRIER, "barrier", everyone),
        Sync(SyncKind.GRADIENTS, "DDP gradients", everyone),
    ]
    work = work_array(
        7, 5, world, backward=random.uniform(0, 9, (7, 5, world)), data=random.uniform(0, 3, (7, 5, world))
    )
    for k, sync in enumerate(syncs):
        work[:, k, [r for r in everyone if r not in sync.members]] = 0
    lag = random.normal(0, 0.05, (7, 5, world))
    for k, sync in enumerate(syncs):
        own = lag[:, k, list(sync.members)]
        lag[:, k, list(sync.members)] = own - np.median(own, axis=1, keepdims=True)
    return graph_of(cycles_of(syncs, work, random.uniform(0.5, 4, (7, 5)), lag))


@pytest.mark.parametrize("seed", range(6))
def test_the_baseline_is_the_measured_job(seed):
    graph = random_graph(seed)
    for group in graph.groups:
        np.testing.assert_allclose(replay(group, baseline(group)), group.duration, rtol=1e-9)
    assert replay_all(graph).mean() == pytest.approx(graph.mean_cycle_ns, rel=1e-9)
    assert gain_ns(graph) == pytest.approx(0.0, abs=1.0)


@pytest.mark.parametrize("delay_ms", [0.5, 4.0, 200.0])
@pytest.mark.parametrize("world", [2, 4, 64])
def test_taking_out_a_delay_gains_that_delay(delay_ms, world):
    graph = simple(world, data=on(1, world, delay_ms))
    assert gain_ns(graph, without_work(of_component(graph, "data"))) == pytest.approx(delay_ms * MS)


def test_a_delay_hidden_behind_a_later_rank_gains_only_what_stands_out():
    graph = simple(4, data=on(1, 4, 5.0), host=on(2, 4, 3.0))
    assert gain_ns(graph, without_work(of_component(graph, "data"))) == pytest.approx(2.0 * MS)
    assert gain_ns(graph, without_work(of_component(graph, "host"))) == pytest.approx(0.0, abs=1)
    both = [without_work(of_component(graph, name)) for name in ("data", "host")]
    assert gain_ns(graph, *both) == pytest.approx(5.0 * MS)


def test_no_more_work_is_taken_out_than_there_is():
    graph = simple(2)
    everything = [np.full(group.arrival.shape, 1e12) for group in graph.groups]
    assert replay_all(graph, [without_work(everything)]).mean() == pytest.approx(2.0 * MS), (
        "the transfer stays"
    )


def test_a_broadcast_waits_for_its_root_alone():
    """Rank 2 is late at the broadcast from rank 0, but nobody waits for it there."""
    world, everyone = 3, (0, 1, 2)
    syncs = [
        Sync(SyncKind.BROADCAST, "DDP buffers", everyone, root=0),
        Sync(SyncKind.GRADIENTS, "allreduce", everyone),
    ]
    at_root, elsewhere = [np.stack([on(r, world, 6.0)[0, 0], np.zeros(world)])[None] for r in (0, 2)]
    late_root = graph_of(
        cycles_of(syncs, work_array(5, 2, world, forward=1.0, data=at_root), transfer_ms=0.0)
    )
    late_other = graph_of(
        cycles_of(syncs, work_array(5, 2, world, forward=1.0, data=elsewhere), transfer_ms=0.0)
    )
    for graph in (late_root, late_other):
        np.testing.assert_allclose(replay_all(graph), 8.0 * MS)
    without = without_sync(lambda group, k: group.syncs[k].kind == SyncKind.BROADCAST)
    assert gain_ns(late_other, without) == pytest.approx(0.0, abs=1)
    # Rank 1 goes on at 1 ms instead of 7, but rank 0 comes to the reduction no earlier.
    assert gain_ns(late_root, without) == pytest.approx(0.0, abs=1)


def test_a_broadcast_costs_where_others_could_have_used_the_time():
    world, everyone = 2, (0, 1)
    syncs = [
        Sync(SyncKind.BROADCAST, "DDP buffers", everyone, root=0),
        Sync(SyncKind.GRADIENTS, "allreduce", everyone),
    ]
    forward = np.array([[6.0, 0.0], [0.0, 6.0]])[None]
    graph = graph_of(cycles_of(syncs, work_array(5, 2, world, forward=forward), transfer_ms=0.0))
    assert shared_of(graph)["broadcast"].ms_per_step == pytest.approx(6.0)


def test_without_a_barrier_ranks_go_on():
    world, everyone = 2, (0, 1)
    syncs = [Sync(SyncKind.BARRIER, "barrier", everyone), Sync(SyncKind.GRADIENTS, "allreduce", everyone)]
    work = work_array(5, 2, world, forward=np.array([[6.0, 1.0], [1.0, 6.0]])[None])
    graph = graph_of(cycles_of(syncs, work, transfer_ms=0.5))
    assert gain_ns(graph, without_sync(lambda g, k: g.syncs[k].kind == SyncKind.BARRIER)) == pytest.approx(
        5.5 * MS
    )


def test_the_last_meeting_of_a_cycle_loses_only_its_transfer():
    graph = simple(3, data=on(0, 3, 2.0), transfer_ms=1.5)
    assert gain_ns(graph, without_sync(lambda group, k: True)) == pytest.approx(1.5 * MS)


def test_transfers():
    graph = graph_of(cycles_of(reductions(4, 2), work_array(5, 2, 4, backward=5.0), transfer_ms=3.0))
    half = [np.full((5, 2), 1.5 * MS)]
    assert gain_ns(graph, without_transfer(half)) == pytest.approx(3.0 * MS)
    assert gain_ns(graph, without_transfer([np.full((5, 2), 99 * MS)])) == pytest.approx(6.0 * MS)


def test_reductions_repeated_within_a_step_are_priced():
    syncs = [Sync(SyncKind.GRADIENTS, "DDP gradients", (0, 1), micro=m, group="ddp0") for m in range(3)]
    graph = graph_of(cycles_of(syncs, work_array(6, 3, 2, backward=5.0), transfer_ms=2.0))
    assert shared_of(graph)["redundant_sync"].ms_per_step == pytest.approx(4.0)
    single = graph_of(cycles_of(syncs[2:], work_array(6, 1, 2, backward=15.0), transfer_ms=2.0))
    assert "redundant_sync" not in shared_of(single)


def test_usual_transfer_is_priced_without_its_disturbances():
    transfer = np.where(np.arange(40)[:, None] % 10 == 0, 30.0, 2.0)
    graph = graph_of(cycles_of(reductions(2), work_array(40, 1, 2, backward=8.0), transfer_ms=transfer))
    assert shared_of(graph)["communication"].ms_per_step == pytest.approx(2.0)


def test_nothing_measured():
    empty = graph_of(simple(2).groups[0])
    empty.groups.clear()
    assert gain_ns(empty) == 0.0 and len(replay_all(empty)) == 0


def overlapped(late_ms, cycles=3):
    """Three buckets of 3 ms beside a backward pass on two devices, of which the second's is evenly slower, as a device's timeline
    shows it: a part starts when its gradients are ready and the part before it is over."""
    syncs = reductions(2, 3)
    ready = np.array([[4.0, 6.0, 8.0], [4.0 + late_ms / 3, 6.0 + 2 * late_ms / 3, 8.0 + late_ms]]).T
    arrival, end, over = np.zeros((3, 2)), np.zeros((3, 2)), 0.0
    for k in range(3):
        arrival[k] = np.maximum(ready[k], over)
        end[k] = over = arrival[k].max() + 3.0
    group = cycles_of(syncs, work_array(cycles, 3, 2, backward=9.0))
    shape = (cycles, 3, 2)
    measured = replace(
        group,
        begin=np.zeros((cycles, 2)),
        arrival=np.broadcast_to(arrival * MS, shape),
        end=np.broadcast_to(end * MS, shape),
        ready=np.broadcast_to(ready * MS, shape),
        on_device=True,
    )
    return graph_of(measured)


@pytest.mark.parametrize("late_ms", [1.5, 3.0, 12.0])
def test_a_slow_backward_pass_holds_up_each_bucket_and_not_the_last_alone(late_ms):
    """By segments, all that the late rank does longer lies behind its last bucket but one: the others, whose parts wait for
    its own, have computed more by then."""
    slow, even = overlapped(late_ms), overlapped(0.0)
    told_last = np.zeros((3, 3, 2))
    told_last[:, 2, 1] = late_ms * MS
    saved_ns = slow.mean_cycle_ns - even.mean_cycle_ns
    assert gain_ns(slow, without_work([told_last])) == pytest.approx(saved_ns)


def test_what_all_ranks_do_stays_where_it_was_told():
    slow = overlapped(3.0)
    common = np.zeros((3, 3, 2))
    common[:, 2] = 2.0 * MS
    early = common.copy()
    early[:, 0] = 0.5 * MS
    group = slow.groups[0]
    np.testing.assert_allclose(place_removed_work(group, common), common)
    np.testing.assert_allclose(place_removed_work(group, early).sum(axis=1), early.sum(axis=1))
