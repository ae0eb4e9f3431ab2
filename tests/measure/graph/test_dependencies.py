"""Which collectives hold up the computation, though their kind does not say so, and how sure that is."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.measure.graph import ComputeTimeline, CycleGroup, Sync, dependency_probability
from ddpdoctor.measure.replay import baseline, replay
from ddpdoctor.measure.taxonomy import COMPONENTS
from tests.generator import SMALL, Config, Plant, generate

MS, US = 1e6, 1e3
ARRIVAL, END = 10 * MS, 14 * MS
CYCLE = 100 * MS


def lane(computes_ns, launched_ns=None, over=(), host_waits=()):
    """A rank with these kernels (begin and end, ns), and when each was launched, where that is known."""
    table = np.array(computes_ns, float).reshape(-1, 2)
    launched = np.full(len(table), np.nan) if launched_ns is None else np.array(launched_ns, float)
    waits = np.array(host_waits, float).reshape(-1, 2)
    return ComputeTimeline(
        (table[:, 0], table[:, 1]), launched, np.sort(np.array(over, float)), (waits[:, 0], waits[:, 1])
    )


def of_one(*computes_ms):
    """How sure it is that a rank with these kernels waits for a collective from 10 to 14 ms."""
    own = lane([[edge * MS for edge in pair] for pair in computes_ms])
    return dependency_probability([own], np.full((3, 1, 1), ARRIVAL), np.full((3, 1, 1), END))[0, 0]


def over_cycles(ends, resumed, launched=None, host_waits=()):
    """How sure it is, where a rank computes for 10 ms of each cycle, then again from ``resumed`` on, ns from the cycle's
    begin, and the collective from 10 ms on ends at ``ends``."""
    begin = CYCLE * np.arange(len(ends))
    kernels = [
        (b + at, b + until)
        for b, r in zip(begin, resumed, strict=True)
        for at, until in ((0, ARRIVAL), (r, r + MS))
    ]
    known = None
    if launched is not None:
        known = [
            at for b, r, at_ in zip(begin, resumed, launched, strict=True) for at in (b - 0.1 * MS, b + at_)
        ]
    end = (begin + ends)[:, None, None]
    waits = [(b + one, b + other) for b, (one, other) in zip(begin, host_waits, strict=False)]
    own = lane(kernels, known, end.ravel(), waits)
    return dependency_probability([own], (begin + ARRIVAL)[:, None, None], end)[0, 0]


@pytest.mark.parametrize(
    ("computes_ms", "waits"),
    [
        ([(0, 10), (14.005, 20)], True),  # stands still all the time, goes on at once
        ([(0, 12), (14.01, 20)], True),  # computes beside it for a while, then waits for it
        ([(0, 10), (13.9995, 20)], True),  # clocks are read to the microsecond
        ([(0, 20)], False),  # computes on
        ([(0, 10), (16, 20)], False),  # goes on later, for another reason
        ([(0, 13.98), (14.01, 20)], False),  # a gap between two kernels that were launched slowly
        ([(0, 10)], False),  # nothing comes after it
        ([], False),
    ],
)
def test_a_computation_that_goes_on_at_the_end_of_a_collective_waited_for_it(computes_ms, waits):
    assert of_one(*computes_ms) == pytest.approx(float(waits), abs=0.1)


def test_short_collectives_between_kernels_are_rather_waited_for():
    """Tensor parallelism: 60 us of transfer in which nothing else runs."""
    arrival, end = np.array([[[1.0]]]) * MS, np.array([[[1.06]]]) * MS
    kernels = lane([(0.0, 1.0 * MS), (1.063 * MS, 2.0 * MS)])
    assert dependency_probability([kernels], arrival, end)[0, 0] > 0.6
    launched = lane([(0.0, 1.0 * MS), (1.063 * MS, 2.0 * MS)], [0.0, 0.1 * MS])
    assert dependency_probability([launched], arrival, end)[0, 0] == 1.0


def test_ranks_are_judged_alone_and_by_most_of_their_cycles():
    arrival = np.array([[[10.0, 10.0, np.nan]], [[30.0, 30.0, np.nan]], [[50.0, 50.0, np.nan]]]) * MS
    end = arrival + 4 * MS
    waits = lane(np.array([(0, 10.0), (14.01, 30.0), (34.01, 50.0), (54.01, 60.0)]) * MS)
    computes_on = lane([(0.0, 60.0 * MS)])
    mostly = lane(np.array([(0, 10.0), (14.01, 30.0), (34.01, 60.0)]) * MS)
    sure = dependency_probability([waits, computes_on, waits], arrival, end)
    assert sure.tolist() == [[1.0, 0.0, 0.0]]
    assert 0 < dependency_probability([mostly], arrival[:, :, :1], end[:, :, :1])[0, 0] < 1


def test_no_microsecond_decides():
    """With nothing but the gap to judge by: less sure with each microsecond, and never much at once."""
    sure = np.array([of_one((0, 10), (14 + gap_us / 1e3, 20)) for gap_us in range(5, 1000)])
    assert sure[0] == 1.0 and sure[-1] < 0.2
    assert (np.diff(sure) <= 1e-9).all() and np.diff(sure).min() > -0.02


@pytest.mark.parametrize("seed", range(5))
def test_what_waits_moves_with_the_end_however_long_the_gap(seed):
    rng = np.random.default_rng(seed)
    ends = END + rng.normal(0, 100 * US, 8)
    gap = rng.uniform(5 * US, 300 * US)
    assert over_cycles(ends, ends + gap + rng.normal(0, 3 * US, 8)) > 0.9


@pytest.mark.parametrize("seed", range(5))
def test_what_does_not_wait_keeps_its_own_pace(seed):
    rng = np.random.default_rng(seed)
    ends = END + rng.normal(0, 100 * US, 8)
    resumed = ends.max() + rng.uniform(5 * US, 300 * US) + rng.normal(0, 3 * US, 8)
    assert over_cycles(ends, resumed) < 0.1


def test_a_late_launch_is_the_hosts_unless_the_host_waited():
    ends = END + 1e5 * np.array([0.0, 1, 2, 3, 1, 0])
    resumed = ends + 60 * US
    host_waits = [(11 * MS, end + 10 * US) for end in ends]
    paced = END + 4e5 + np.zeros(6)
    assert over_cycles(ends, paced, launched=paced - 8 * US) == 0.0
    assert over_cycles(ends, resumed, launched=resumed - 8 * US, host_waits=host_waits) == 1.0


def test_the_computation_waits_for_the_last_of_several_collectives():
    begin = CYCLE * np.arange(4)
    first, second = begin + END, begin + END + 0.04 * MS
    kernels = [pair for b in begin for pair in ((b, b + 10 * MS), (b + END + 0.05 * MS, b + 20 * MS))]
    own = lane(kernels, over=[*first, *second])
    end = np.stack([first, second], axis=1)[:, :, None]
    arrival = np.stack([begin + 10 * MS, first], axis=1)[:, :, None]
    assert dependency_probability([own], arrival, end).ravel() == pytest.approx([0.0, 1.0], abs=0.1)


def _priced(folder, world, gap_us, late_ms, seed):
    """(ms that the straggler costs, ms by the diagnosis)."""
    config = Config(
        world_size=world,
        tensor_parallel=world,
        seed=seed,
        resume_us=gap_us,
        **SMALL,
        bucket_bytes=(2_000_000,) * 2,
        plants=(Plant("slow_backward_kernels", ranks=(1,), ms=late_ms),),
    )
    truth = generate(config, folder)
    diagnosis = analyze(str(folder), Options(cache=False, jobs=1))
    assert diagnosis.facts["late"]["compute"]["ranks"] == [1]
    return truth.plants[0].cost_us_per_step / 1e3, diagnosis.facts["late"]["compute"]["ms_per_step"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
@pytest.mark.extended
def test_the_price_of_a_straggler_does_not_hang_on_the_gap_behind_a_collective(tmp_path, seed):
    rng = random.Random(seed)
    world, late_ms = rng.choice((2, 4)), rng.uniform(0.5, 3.0)
    gaps_us = [49.5, 50.5, rng.uniform(5, 50), rng.uniform(50, 300)]
    found = [_priced(tmp_path / f"{gap_us}", world, gap_us, late_ms, seed) for gap_us in gaps_us]
    for costs_ms, told_ms in found:
        assert told_ms == pytest.approx(costs_ms, rel=0.2, abs=0.1)
    assert found[0][1] == pytest.approx(found[1][1], rel=0.02)


@pytest.mark.parametrize(("seen", "saved"), [(1.0, 3), (0.5, 1.5), (0.0, 0)])
def test_what_is_waited_for_moves_the_computation(seen, saved):
    """Two parts of sharded parameters, a computation of 10 ms after each: a transfer that is 3 ms shorter saves 3 ms where
    the computation waits for it, nothing where it does not, and half of them where both are as likely."""
    syncs = (Sync("gradients", "allgather", (0, 1)), Sync("gradients", "allgather", (0, 1)))
    both = np.ones((1, 1, 2))
    arrival = np.concatenate([both * 10, both * 24], axis=1) * MS
    end = np.concatenate([both * 14, both * 28], axis=1) * MS
    group = CycleGroup(
        *(syncs, np.array([1]), np.zeros((1, 2)), arrival, end, np.zeros((1, 2, 2, len(COMPONENTS)))),
        np.full((1, 2), 1e6),
        on_device=True,
        dependency_probability=np.full((2, 2), seen),
    )
    world = baseline(group)
    assert replay(group, world)[0] == 28 * MS
    assert group.with_dependencies(True).dependency_probability[0].tolist() == [float(seen > 0)] * 2
    world.transfer[:, 0] -= 3 * MS
    assert replay(group, world)[0] == (28 - saved) * MS
