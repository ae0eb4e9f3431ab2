"""One rank that stops in few of many short steps, on a machine that disturbs every rank often, and for less."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.measure.numerics import outliers_of_few_ranks
from tests.generator import SMALL, Config, Plant, When
from tests.generator.rundirectory import generate_run
from tests.measure.grids import pairs_first
from tests.measure.recorded import Job, record

pytestmark = pytest.mark.extended

PHASES_MS = {"data": 0.3, "host": 0.8, "forward": 2.5, "backward": 5.0, "optimizer": 0.6}
"""A step of 11 ms, with its transfer."""
STALL_MS = 57.0


def disturbed(world, steps, seed, rate, ms):
    """[steps, world, phases] ms: small scatter, and pauses of ``ms`` on average that strike a rank at this rate wherever it is."""
    random = np.random.default_rng(seed)
    usual = np.array(list(PHASES_MS.values()))
    longer = np.abs(random.normal(0.0, 0.03, (steps, world, len(usual)))) * usual
    struck = random.random((steps, world)) < rate
    place = random.choice(len(usual), (steps, world), p=usual / usual.sum())
    step, rank = np.nonzero(struck)
    longer[step, rank, place[struck]] += random.exponential(ms, struck.sum())
    return longer


def job(phase, every, ranks, *, world, steps, seed, rate=0.6, ms=4.0):
    noise = disturbed(world, steps, seed, rate, ms)

    def extra(rank, step):
        longer = dict(zip(PHASES_MS, noise[step, rank].tolist(), strict=True))
        if rank in ranks and step % every == 3:
            longer[phase] += STALL_MS
        return longer

    return Job(world=world, steps=steps, extra=extra, transfer=1.0, **PHASES_MS)


@pytest.mark.parametrize(
    ("phase", "every", "job_ranks"),
    pairs_first(("data", "host", "forward", "backward"), (5, 10, 30), ((2, [0]), (4, [2]), (4, [1, 3]))),
)
def test_the_rank_that_loses_the_time_is_named(phase, every, job_ranks, tmp_path):
    world, ranks = job_ranks
    run = record(tmp_path / "run", job(phase, every, ranks, world=world, steps=300, seed=world + every))
    said = analyze(str(run), Options(cache=False))
    first = said.findings[0]
    assert first.ranks == ranks and "rank-imbalance/alternating" not in {f.rule for f in said.findings}
    # What the machine does to the rank in its stalled steps hides behind them; to the others, it is saved with them.
    assert first.costs_ms_per_step == pytest.approx(STALL_MS / every, rel=0.35)


@pytest.mark.parametrize("world", [2, 4])
def test_the_machine_s_own_pauses_accuse_nobody(world, tmp_path):
    for seed in range(3):
        quiet = job("host", 1000, [], world=world, steps=200, seed=seed)
        said = analyze(str(record(tmp_path / f"run{seed}", quiet)), Options(cache=False))
        assert [f.rule for f in said.findings if f.ranks and f.severity != "info"] == []


@pytest.mark.parametrize("every", [5, 10])
def test_a_device_s_host_that_stops_for_long_among_short_pauses(every, tmp_path):
    noise = [
        Plant("host_gap_backward", ranks=(rank,), ms=2.0, when=When(first=-60, probability=0.4))
        for rank in range(4)
    ]
    stall = Plant(
        "host_work_end_of_step", ranks=(1,), ms=STALL_MS, when=When(first=-57, last=-1, every=every)
    )
    config = Config(warmup_steps=60, steps=5, **SMALL, plants=(stall, *noise))
    generate_run(config, tmp_path / "run")
    said = analyze(str(tmp_path / "run"), Options(cache=False))
    assert said.findings[0].ranks == [1]
    assert said.findings[0].costs_ms_per_step == pytest.approx(STALL_MS / every, rel=0.35)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_sizes_that_chance_deals_out_are_seldom_one_rank_s(world):
    """Heavy tails included: looking at the largest ones first must not accuse more often than the limit."""
    random, accused = np.random.default_rng(world), 0
    for _ in range(400):
        outliers = random.random((60, world)) < 0.15
        sizes = np.where(outliers, 1.0 + random.pareto(1.3, outliers.shape), 0.0)
        accused += outliers_of_few_ranks(outliers, sizes, np.arange(60)).any()
    assert accused <= 0.03 * 400
