"""Ranks that are late in turn: the whole cost, and nobody accused."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.measure.attribution import attribute
from tests.measure.grids import pairs_first
from tests.measure.made import shared_of, simple
from tests.measure.recorded import Job, late_facts, measured, plant, record

LONG_MS = 8.0


def in_turn(phase, ms=LONG_MS):
    """``extra`` that acts on rank *step mod R*."""
    return lambda world: lambda rank, step: {phase: ms} if step % world == rank else {}


def at_random(phase, ms=LONG_MS, seed=0):
    """``extra`` that acts on one rank in each step, drawn anew."""

    def of(world):
        whose = np.random.default_rng(seed).integers(0, world, 1000)
        return lambda rank, step: {phase: ms} if whose[step] == rank else {}

    return of


@pytest.mark.parametrize(
    ("turns", "phase", "world", "steps"),
    pairs_first((in_turn, at_random), ("host", "forward", "backward"), (2, 3, 4, 8), (30, 31)),
)
def test_the_whole_cost_and_nobody_accused(turns, phase, world, steps, tmp_path):
    extra = turns(phase)(world)
    long = Job(world=world, steps=steps, extra=extra, elements=lambda r, n: 900 if extra(r, n) else 600)
    found, _ = measured(record(tmp_path / "run", long))
    late = late_facts(found)
    assert set(late) == {"turns", "total"}
    cost = late["turns"]
    assert cost.ranks is None and cost.persistence == "always"
    assert cost.ms_per_step == pytest.approx(LONG_MS, rel=0.03)
    assert late["total"].ms_per_step == pytest.approx(cost.ms_per_step)
    assert cost.period_steps == (world if turns is in_turn else None)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("turns", [in_turn, at_random])
def test_batches_that_come_late_in_turn_are_a_slow_loader_of_all(turns, world, tmp_path):
    job = Job(world=world, steps=40, extra=turns("data")(world))
    found, _ = measured(record(tmp_path / "run", job))
    assert late_facts(found) == {}
    data = found.facts.shared.data
    assert data.ranks is None and data.ms_per_step == pytest.approx(job.data + LONG_MS, rel=0.05)


def test_the_diagnosis_says_so(tmp_path):
    said = analyze(
        str(record(tmp_path / "run", Job(steps=40, extra=in_turn("host")(4)))), Options(cache=False)
    )
    assert said.verdict.rule == "rank-imbalance/alternating"
    first = said.findings[0]
    assert first.ranks is None and first.costs_ms_per_step == pytest.approx(LONG_MS, rel=0.03)


def test_a_rank_that_is_always_late_is_accused_beside_turns_of_another_kind(tmp_path):
    turns, always = in_turn("host")(4), plant(2, backward=5.0)
    job = Job(steps=40, extra=lambda rank, step: turns(rank, step) | always(rank, step))
    late = late_facts(measured(record(tmp_path / "run", job))[0])
    assert late["compute"].ranks == [2] and late["turns"].ranks is None
    # In its own turn the late rank is late for both; in the others' turns they hide behind each other.
    assert late["total"].ms_per_step == pytest.approx((3 * LONG_MS + LONG_MS + 5.0) / 4, rel=0.03)


def test_a_rank_with_most_turns_of_all_is_accused(tmp_path):
    """Late in four of five steps, another one in the fifth."""
    job = Job(steps=40, extra=lambda rank, step: {"host": LONG_MS} if rank == (3 if step % 5 else 0) else {})
    late = late_facts(measured(record(tmp_path / "run", job))[0])
    assert "turns" not in late and late["host"].ranks == [3]


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("jitter", [0.05, 0.2])
def test_scatter_is_no_turn(world, jitter):
    for seed in range(10):
        assert not attribute(simple(world, 60, jitter=jitter, seed=seed, host=1.0, data=2.0)).turns_causes


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_long_computation_at_random_of_equal_inputs_may_be_the_machine_s(phase, tmp_path):
    job = Job(steps=40, extra=at_random(phase)(4), elements=lambda rank, step: 600)
    assert late_facts(measured(record(tmp_path / "run", job))[0]) == {}


def test_inputs_that_vary_without_making_anyone_late_are_no_evidence(tmp_path):
    sizes = np.random.default_rng(4).integers(300, 900, (1000, 4))
    job = Job(steps=40, extra=at_random("forward")(4), elements=lambda rank, step: int(sizes[step, rank]))
    assert late_facts(measured(record(tmp_path / "run", job))[0]) == {}


def test_halves_that_even_out_are_no_turns():
    turn = (np.arange(40)[:, None, None] + np.arange(4)) % 2 * 6.0
    graph = simple(4, 40, jitter=0.01, forward=5.0 + turn, backward=16.0 - turn)
    assert attribute(graph).turns_causes == () and "data" not in shared_of(graph)
