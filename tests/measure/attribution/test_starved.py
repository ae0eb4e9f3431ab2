"""A rank that waits for its core, on machines that are quiet or busy for all ranks alike: who is named, and at which price."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from ddpdoctor.measure.attribution import attribute
from tests.measure.made import MS, cycles_of, graph_of, late_of, reductions, work_array

RUN_MS, PERIOD_MS = 20.0, 10.0
READ_IN_FULL = 64
"""Steps of a run whose scheduling is recorded; of later ones each sixteenth's."""


def beside_a_neighbour(ran_ms, part, phase_ms):
    """ms that a thread which needs a core for ``ran_ms`` waits for a program that takes it for this part of each period."""
    busy, free = part * PERIOD_MS, (1 - part) * PERIOD_MS
    at_first = max(busy - phase_ms, 0.0)
    before_the_next = min(PERIOD_MS - phase_ms, free)
    return at_first + busy * max(np.ceil((ran_ms - before_the_next) / free), 0.0)


def busy(chance, cycles, world, mean_ms, drift):
    """[cycles, R] ms of waits for programs that come and go, on every rank alike; their number drifts over some ten steps."""
    level = np.zeros((cycles, world))
    for n in range(1, cycles):
        level[n] = 0.9 * level[n - 1] + np.sqrt(1 - 0.9**2) * chance.standard_normal(world)
    return mean_ms * np.exp(drift * level - drift**2 / 2) * chance.exponential(1.0, (cycles, world))


def job(
    seed,
    cycles,
    world,
    *,
    parts=None,
    more_ms=None,
    mean_ms=0.2,
    drift=0.0,
    wait_ms=None,
    without=None,
    in_host=0.05,
):
    """A job on CPUs, and its mean step without the neighbours, ms. ``parts`` are what a neighbour takes of each rank's core, ``more_ms``
    what each rank computes longer, ``wait_ms`` what it sleeps in the loop; ``without`` neighbours is every so manieth step; ``in_host``
    is the part of its work that is Python code outside of the phases."""
    chance = np.random.default_rng(seed)
    ran = RUN_MS * (1 + 0.01 * chance.standard_normal((cycles, world)).clip(-3, 3))
    ran += 0.0 if more_ms is None else np.array(more_ms)
    waits = busy(chance, cycles, world, mean_ms, drift)
    starved = np.zeros((cycles, world))
    for rank, part in enumerate(parts or ()):
        phases = chance.uniform(0, PERIOD_MS, cycles)
        starved[:, rank] = [beside_a_neighbour(ran[n, rank], part, phases[n]) for n in range(cycles)]
    if without is not None:
        starved[::without] = 0.0
    whole = ran + waits + starved
    asleep = np.zeros((cycles, world)) if wait_ms is None else np.broadcast_to(wait_ms, (cycles, world))
    forward, backward, host = ((each * whole)[:, None, :] for each in (0.3, 0.7 - in_host, in_host))
    work = work_array(cycles, 1, world, forward=forward, backward=backward, host=host + asleep[:, None, :])
    read = (np.arange(cycles) < READ_IN_FULL) | (np.arange(cycles) % 16 == 0)
    delay = np.where(read[:, None], waits + starved, np.nan)
    cpu = np.where(read[:, None], ran, np.nan)
    graph = graph_of(cycles_of(reductions(world), work), run_delay_ms=delay.T, cpu_ms=cpu.T)
    return graph, float((ran + waits + asleep).max(axis=1).mean()) + 1.0


def names(graph):
    """Ranks that are told to be starved, and those told to be late for anything else."""
    attribution = attribute(graph)
    starved = sum(
        (of_group.sum(axis=(0, 1, 3)) for of_group in attribution.starved), np.zeros(len(graph.ranks))
    )
    return np.flatnonzero(starved).tolist(), attribution.stragglers


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("cycles", [40, 140])
def test_the_rank_beside_whose_core_a_program_runs_is_named_at_its_price(cycles, world):
    errors = []
    for seed, part in enumerate(np.linspace(0.1, 0.45, 8)):
        graph, without_ms = job(
            seed, cycles, world, parts=[0.0] * (world - 1) + [part], mean_ms=1.0, drift=0.5
        )
        late = late_of(graph)
        assert late["cpu_starved"].ranks == [world - 1] and set(late) == {"cpu_starved", "total"}
        assert late["cpu_starved"].awake_ms is not None
        truth_ms = graph.mean_cycle_ns / MS - without_ms
        errors.append(late["cpu_starved"].ms_per_step / truth_ms - 1)
    assert abs(np.mean(errors)) < 0.1 and np.abs(errors).max() < 1 / 3, errors


@pytest.mark.parametrize("in_host", [0.3, 0.7])
def test_python_code_outside_of_the_phases_waits_for_the_core_too(in_host):
    for seed in range(4):
        graph, without_ms = job(seed, 60, 2, parts=[0.0, 0.4], mean_ms=1.0, drift=0.5, in_host=in_host)
        late = late_of(graph)
        assert late["cpu_starved"].ranks == [1] and set(late) == {"cpu_starved", "total"}
        truth_ms = graph.mean_cycle_ns / MS - without_ms
        assert late["cpu_starved"].ms_per_step == pytest.approx(truth_ms, rel=1 / 3)


def test_it_may_have_its_core_in_every_third_step():
    graph, _ = job(3, 120, 2, parts=[0.0, 0.2], without=3)
    cost = late_of(graph)["cpu_starved"]
    assert cost.ranks == [1] and cost.persistence != "always"


ALIKE = ({"mean_ms": 0.3}, {"mean_ms": 8.0}, {"part": 0.3, "mean_ms": 1.0}, {"part": 0.45, "mean_ms": 8.0})
STATED = 0.01


def accused(seeds, drift):
    """Of jobs whose ranks are alike, the part in which one is told to be starved."""
    told = []
    for seed, how, cycles, world in product(seeds, ALIKE, (20, 60, 140), (2, 4)):
        parts = [how.get("part", 0.0)] * world
        told.append(
            bool(names(job(seed, cycles, world, parts=parts, mean_ms=how["mean_ms"], drift=drift)[0])[0])
        )
    return np.array(told)


def test_on_a_machine_that_is_busy_for_all_ranks_alike_nobody_is():
    told = accused(range(5), 0.0)
    assert told.mean() <= STATED + 3 * np.sqrt(STATED * (1 - STATED) / told.size)


@pytest.mark.slow
@pytest.mark.parametrize(("drift", "most"), [(0.0, 0.02), (1.0, 0.05)])
def test_how_often_chance_names_one(drift, most):
    """Programs that stay for some ten steps name a rank more often, as one that is late while that lasts."""
    told = accused(range(100, 140), drift)
    assert told.mean() <= most, told.mean()


def test_who_runs_longer_is_not_starved():
    """Rank 1 computes 5 ms longer; each rank waits for a core in proportion."""
    graph, _ = job(1, 60, 2, more_ms=[0.0, 5.0], mean_ms=0.2)
    assert names(graph) == ([], {"compute": [1]})


def test_who_sleeps_in_the_loop_is_not_starved():
    graph, _ = job(1, 60, 2, wait_ms=[0.0, 5.0])
    assert names(graph) == ([], {"host": [1]})


def test_who_sleeps_and_is_starved_is_told_both():
    graph, _ = job(1, 60, 2, parts=[0.0, 0.3], wait_ms=[0.0, 5.0])
    assert names(graph) == ([1], {"host": [1]})
