"""Who is late, and for what: hand-made graphs of jobs whose culprits are known."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.measure.attribution import attribute
from ddpdoctor.measure.graph import Sync
from ddpdoctor.measure.taxonomy import SyncKind
from tests.measure.made import (
    MS,
    cycles_of,
    graph_of,
    late_of,
    on,
    reductions,
    shared_of,
    simple,
    work_array,
)

WORLDS = (2, 3, 4, 8, 64)
CAUSES = {
    "data": "data",
    "epoch_start": "data",
    "copy": "copy",
    "forward": "compute",
    "backward": "compute",
    "optimizer": "optimizer",
    "host": "host",
    "launch": "host",
    "collection": "collection",
    "checkpoint": "checkpoint",
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("jitter", [0.0, 0.02, 0.1, 0.3])
def test_nobody_late(world, jitter):
    graph = simple(world, jitter=jitter, data=1.0, host=0.5)
    assert attribute(graph).stragglers == {} and late_of(graph) == {}


def test_few_cycles_of_ranks_alike_hardly_ever_name_one():
    """Where only each rank's own scatter counted, 8 of 60 such windows did."""
    windows = (simple(8, 5, seed=seed, jitter=0.1, data=1.0, host=0.5, copy=0.3) for seed in range(60))
    assert sum(bool(attribute(window).stragglers) for window in windows) <= 3


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("component", CAUSES)
def test_one_rank_late_in_every_step(world, component):
    base = {"forward": 5.0, "backward": 10.0}.get(component, 0.0)
    graph = simple(world, jitter=0.02, **{component: base + on(world - 1, world, 4.0)})
    healthy = simple(world, jitter=0.02, **{component: base})
    late = late_of(graph)
    assert set(late) == {CAUSES[component], "total"}
    cost = late[CAUSES[component]]
    assert cost.ranks == [world - 1] and cost.persistence == "always" and cost.steps_hit == cost.steps_seen
    true_ms = (graph.mean_cycle_ns - healthy.mean_cycle_ns) / MS
    assert cost.ms_per_step == pytest.approx(true_ms, abs=0.03 * graph.mean_cycle_ns / MS)
    assert late["total"].ms_per_step == pytest.approx(cost.ms_per_step, abs=0.3)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("every", "kind"), [(5, "periodic"), (9, "periodic")])
def test_one_rank_late_every_few_steps(world, every, kind):
    cycles = 60
    late = late_of(simple(world, cycles, jitter=0.02, host=on(0, world, 30.0, cycles=cycles, every=every)))
    assert set(late) == {"host", "total"}
    cost = late["host"]
    assert (cost.ranks, cost.persistence, cost.period_steps) == ([0], kind, every)
    assert cost.steps_hit == len(range(0, cycles, every))
    assert cost.ms_per_step == pytest.approx(30.0 / every, rel=0.05)
    assert cost.occurrence_ms == pytest.approx(30.0, rel=0.05)


def test_a_single_odd_step_of_many_accuses_nobody():
    assert late_of(simple(4, 60, jitter=0.02, host=on(0, 4, 30.0, cycles=60, every=60))) == {}


@pytest.mark.parametrize("world", [2, 4, 8])
def test_pauses_that_hit_all_ranks_alike_accuse_nobody(world):
    """They all fall into the 3 % of the step that is host work: the code pauses, on whatever rank."""
    random = np.random.default_rng(3)
    spikes = np.where(random.random((80, 1, world)) < 0.08, 40.0, 0.0)
    graph = simple(world, 80, jitter=0.05, host=0.5 + spikes)
    late = late_of(graph)
    assert attribute(graph).stragglers == {} and set(late) == {"turns", "total"}
    assert late["turns"].ranks is None


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_ranks_alternating_around_a_barrier_are_no_stragglers(world):
    """Even ranks work before a barrier, odd ones behind it: the barrier costs, no rank does."""
    everyone = tuple(range(world))
    even = np.array([r % 2 == 0 for r in everyone], float)
    before = np.stack([8.0 * even, 8.0 * (1 - even)])[None]
    syncs = [Sync(SyncKind.BARRIER, "barrier", everyone), Sync(SyncKind.GRADIENTS, "allreduce", everyone)]
    graph = graph_of(
        cycles_of(syncs, work_array(30, 2, world, forward=2.0, backward=before), transfer_ms=0.5)
    )
    assert attribute(graph).stragglers == {}
    barrier = shared_of(graph)["barrier"]
    assert barrier.ms_per_step == pytest.approx(8.5, abs=0.01) and barrier.ranks is None


def test_a_rank_that_makes_up_for_it_elsewhere_is_charged_only_the_rest():
    world = 4
    graph = simple(world, data=on(1, world, 6.0), forward=5.0 - on(1, world, 4.0))
    late = late_of(graph)
    assert late["data"].ranks == [1] and late["data"].ms_per_step == pytest.approx(2.0, abs=0.01)


def test_two_ranks_late_for_one_cause_are_both_named():
    world = 8
    cost = late_of(simple(world, jitter=0.02, data=on(2, world, 5.0) + on(6, world, 5.0)))["data"]
    assert cost.ranks == [2, 6] and cost.ms_per_step == pytest.approx(5.0, abs=0.4)
    assert cost.own_ms == pytest.approx(5.0, abs=0.2) and cost.typical_ms == pytest.approx(0.0, abs=0.01)


def test_two_ranks_late_for_different_causes():
    """Both are named, each with its part; only the later one saves time by itself."""
    world = 4
    late = late_of(simple(world, data=on(0, world, 3.0), host=on(3, world, 5.0)))
    data, host = late["data"], late["host"]
    assert (data.ranks, host.ranks) == ([0], [3])
    assert (data.alone_ms_per_step, data.ms_per_step, data.remaining_ms_per_step) == pytest.approx(
        (0.0, 1.5, 3.0)
    )
    assert (host.alone_ms_per_step, host.ms_per_step, host.remaining_ms_per_step) == pytest.approx(
        (2.0, 3.5, 5.0)
    )
    assert data.speedup == pytest.approx(1.0) and host.speedup == pytest.approx(22.0 / 20.0)
    assert late["total"].ms_per_step == pytest.approx(5.0, abs=0.01)
    assert (data.steps_hit, data.steps_seen) == (40, 40)


def test_two_ranks_equally_late_for_different_causes_share_what_they_cost():
    late = late_of(simple(8, jitter=0.01, data=on(0, 8, 4.0), host=on(3, 8, 4.0)))
    assert late["data"].ms_per_step == pytest.approx(late["host"].ms_per_step, abs=0.3)
    assert late["data"].ms_per_step + late["host"].ms_per_step == pytest.approx(
        late["total"].ms_per_step, abs=0.01
    )
    assert late["total"].ms_per_step == pytest.approx(4.0, abs=0.5)


def test_two_causes_on_one_rank_cost_what_each_saves():
    late = late_of(simple(4, data=on(1, 4, 3.0), host=on(1, 4, 2.0)))
    for cause, ms in (("data", 3.0), ("host", 2.0)):
        cost = late[cause]
        assert (cost.alone_ms_per_step, cost.ms_per_step, cost.remaining_ms_per_step) == pytest.approx(
            (ms,) * 3
        )


@pytest.mark.parametrize("world", [3, 4, 5, 8, 20])
def test_where_all_ranks_but_one_are_slow_nobody_is_accused(world):
    graph = simple(world, jitter=0.05, data=8.0 - on(1, world, 7.0))
    assert late_of(graph) == {}
    assert shared_of(graph)["data"].ms_per_step == pytest.approx(8.0, abs=0.6)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_batches_that_come_late_now_here_now_there_accuse_nobody(world, seed):
    """The wait is real, and more workers save it; that one rank had more of it is chance."""
    random = np.random.default_rng(seed)
    spikes = np.where(random.random((80, 1, world)) < 0.1, 30.0, 0.0)
    graph = simple(world, 80, jitter=0.03, data=1.0 + spikes)
    assert late_of(graph) == {}
    cost = shared_of(graph)["data"]
    assert cost.ranks is None
    assert cost.ms_per_step == pytest.approx(1.0 + spikes.max(axis=2).mean(), rel=0.1)


@pytest.mark.parametrize("world", [4, 8])
def test_the_faster_half_is_not_accused(world):
    """One rank does less than the others: that is no lateness of the others."""
    assert late_of(simple(world, jitter=0.01, backward=10.0 - on(0, world, 6.0))) == {}


def test_less_than_one_per_cent_is_nothing():
    assert late_of(simple(4, jitter=0.001, data=on(2, 4, 0.1))) == {}
    assert late_of(simple(4, jitter=0.001, data=on(2, 4, 0.4)))["data"].ranks == [2]


@pytest.mark.parametrize("cycles", [1, 2, 3])
def test_short_windows_accuse_only_what_is_clear(cycles):
    assert late_of(simple(4, cycles, jitter=0.02)) == {}
    assert late_of(simple(4, cycles, jitter=0.02, data=on(3, 4, 6.0)))["data"].ranks == [3]
    # 5 % of the step: by how much that differs says nothing in one cycle, and enough in two.
    found = late_of(simple(2, cycles, jitter=0.02, data=on(1, 2, 0.8)))
    assert set(found) == ({"data", "total"} if cycles > 1 else set())
    assert not found or found["data"].ranks == [1]


def test_cycles_of_different_shape_speak_together():
    """Every fourth step has a barrier as well: one cause over both shapes of cycle."""
    world, everyone = 4, tuple(range(4))
    plain = cycles_of(
        reductions(world),
        work_array(30, 1, world, backward=10.0, data=on(2, world, 3.0)),
        steps=np.arange(30),
    )
    syncs = [Sync(SyncKind.BARRIER, "barrier", everyone), *reductions(world)]
    late = np.concatenate([on(2, world, 3.0), on(2, world, 0.0)], axis=1)
    other = cycles_of(syncs, work_array(10, 2, world, backward=5.0, data=late), steps=np.arange(30, 40))
    cost = late_of(graph_of(plain, other))["data"]
    assert cost.ranks == [2] and cost.steps_seen == 40 == cost.steps_hit
    assert cost.ms_per_step == pytest.approx(3.0, abs=0.01)


def test_ranks_that_never_meet_cannot_be_late():
    syncs = [Sync(SyncKind.STEP_END, SyncKind.STEP_END, (0, 1, 2))]
    graph = graph_of(cycles_of(syncs, work_array(20, 1, 3, forward=5.0, data=on(1, 3, 9.0)), transfer_ms=0.0))
    assert attribute(graph).stragglers == {} and late_of(graph) == {}


def test_a_single_rank_is_never_late():
    assert late_of(simple(1, data=7.0)) == {}
    assert shared_of(simple(1, data=7.0))["data"].ms_per_step == pytest.approx(7.0)


def test_rank_numbers_are_named_not_positions():
    world = 3
    group = simple(world, data=on(1, world, 5.0)).groups[0]
    assert late_of(graph_of(group, ranks=(3, 17, 40)))["data"].ranks == [17]


def test_what_all_ranks_do_alike_is_shared_and_the_excess_late():
    world = 4
    graph = simple(world, data=6.0 + on(2, world, 4.0))
    assert late_of(graph)["data"].ms_per_step == pytest.approx(4.0, abs=0.01)
    shared = shared_of(graph)["data"]
    assert shared.ms_per_step == pytest.approx(6.0, abs=0.01) and shared.ranks is None


@pytest.mark.parametrize("when", [[9, 19], [9]])
@pytest.mark.parametrize(("savers", "blamed"), [((0,), [0]), ((0, 1, 2, 3), None)])
def test_a_checkpoint_that_only_one_rank_ever_writes_is_its_own_however_seldom(savers, blamed, when):
    """Once or twice in 36 steps: by chance both could be the same one of four ranks, but the others never save."""
    checkpoint = np.zeros((36, 1, 4))
    for rank in savers:
        checkpoint[when, 0, rank] = 800.0
    work = work_array(36, 1, 4, forward=200.0, checkpoint=checkpoint)
    late = late_of(graph_of(cycles_of([Sync(SyncKind.GRADIENTS, "allreduce", (0, 1, 2, 3))], work)))
    assert (late["checkpoint"].ranks if "checkpoint" in late else None) == blamed


@pytest.mark.parametrize("cycles", [2, 3])
def test_two_ranks_in_two_cycles_that_repeat(cycles):
    """1.3 ms of a step of 18 ms, of work that takes half a millisecond and differs by 6 % of that: enough in most windows."""
    late = late_of(simple(2, cycles=cycles, jitter=0.003, host=on(1, 2, 1.3)))
    assert set(late) == {"host", "total"} and late["host"].ranks == [1]
    found = [late_of(simple(2, cycles=cycles, seed=s, jitter=0.06, host=on(1, 2, 1.3))) for s in range(10)]
    named = [each["host"].ranks for each in found if "host" in each]
    assert named == [[1]] * len(named) and len(named) > 5


@pytest.mark.parametrize("jitter", [0.003, 0.03])
def test_nobody_late_in_two_cycles(jitter):
    assert not [s for s in range(50) if late_of(simple(2, cycles=2, seed=s, jitter=jitter, host=1.0))]


@pytest.mark.parametrize("cycles", [2, 3])
def test_half_of_four_ranks_in_a_few_cycles_that_repeat(cycles):
    """Two late ranks of four make the ranks' scatter as large as what they are late by; that it repeats still tells."""
    late = late_of(simple(4, cycles=cycles, jitter=0.003, host=on(1, 4, 3.0) + on(2, 4, 3.0)))
    assert late["host"].ranks == [1, 2] and late["host"].ms_per_step == pytest.approx(3.0, rel=0.1)
    for seed in range(20):
        assert not late_of(simple(4, cycles=cycles, seed=seed, jitter=0.06, host=1.0))
