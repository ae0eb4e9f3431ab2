"""Stops now and then, outside the profiled window, of jobs with devices: found in the step logs of the whole run."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.analysis import Options, prepare
from ddpdoctor.measure.costs import RareSource, lengthening_share, rare_costs
from ddpdoctor.measure.flow import measure
from ddpdoctor.measure.graph import Sync
from ddpdoctor.measure.taxonomy import RARE_ON_HOST, SyncKind
from tests.generator import SMALL, Config, Plant, When
from tests.generator.rundirectory import generate_run
from tests.generator.simulate import simulate, without
from tests.measure.made import MS, NoLines, cycles_of, graph_of, reductions, work_array
from tests.measure.traced import found, reckoned

RUN = Config(**SMALL, warmup_steps=60, steps=5)
"""60 steps before a window of five."""


def now_and_then(kind, ms, every=20, ranks=(1,)):
    """Never in the window."""
    return Plant(kind, ranks=ranks, ms=ms, when=When(first=-55, last=-1, every=every))


def measured(config, folder):
    generate_run(config, folder / "run")
    prepared = prepare([str(folder / "run")], Options(cache=False, jobs=1))
    return reckoned(measure(prepared.logs, prepared.windows, prepared.inputs.telemetry))


def mean_ms(config):
    """Simulated, over the steps that the run measures: those before the window."""
    ends = [
        e.end_us for e in simulate(config, record=False).programs[0].machine.hook_events if e.kind == "opt"
    ]
    return float(np.diff(ends[2 : config.warmup_steps]).mean()) / 1e3


@pytest.mark.parametrize(
    ("kind", "cause", "ms", "line"),
    [
        ("slow_data", "data", 40.0, 20),
        ("checkpoint", "checkpoint", 40.0, 36),
        ("gc_pause", "collection", 30.0, None),
        pytest.param("host_work_end_of_step", "host", 40.0, None, marks=pytest.mark.slow),
    ],
)
def test_a_stop_outside_the_window_is_found_and_priced(kind, cause, ms, line, tmp_path):
    config = Config(**{**vars(RUN), "plants": (now_and_then(kind, ms),)})
    measurement = measured(config, tmp_path)
    late = found(measurement.facts.late)
    assert set(late) == {cause, "total"} and measurement.graphs.primary.source == "trace"
    cost = late[cause]
    assert (cost.ranks, cost.persistence, cost.period_steps, cost.steps_hit) == ([1], "periodic", 20, 3)
    true_ms = mean_ms(config) - mean_ms(without(config, 0))
    assert cost.ms_per_step == pytest.approx(true_ms, rel=0.1)
    assert cost.occurrence_ms == pytest.approx(ms, rel=0.25)
    assert cost.own_ms - cost.typical_ms == pytest.approx(ms * 3 / cost.steps_seen, rel=0.25)
    assert [where.line for where in cost.where] == ([line] if line else [])


def test_what_the_window_shows_is_not_counted_twice(tmp_path):
    """A stop in every second step, inside and outside the window."""
    plant = Plant("slow_data", ranks=(2,), ms=20.0, when=When(first=-55, every=2))
    config = Config(**{**vars(RUN), "plants": (plant,)})
    late = found(measured(config, tmp_path).facts.late)
    true_ms = mean_ms(config) - mean_ms(without(config, 0))
    assert set(late) == {"data", "total"} and late["data"].ranks == [2]
    assert late["data"].ms_per_step == pytest.approx(true_ms, rel=0.1)
    assert late["total"].ms_per_step == pytest.approx(true_ms, rel=0.1)


def test_collections_of_each_rank_at_its_own_time_accuse_nobody(tmp_path):
    plants = tuple(
        Plant("gc_pause", ranks=(rank,), ms=30.0, when=When(first=-57 + 2 * rank, last=-1, every=9))
        for rank in range(4)
    )
    measurement = measured(Config(**{**vars(RUN), "plants": plants}), tmp_path)
    assert measurement.facts.late.collection is None
    cost = measurement.facts.shared.collection
    assert cost.ranks is None and cost.steps_hit > 20
    true_ms = mean_ms(Config(**{**vars(RUN), "plants": plants})) - mean_ms(RUN)
    assert cost.ms_per_step == pytest.approx(true_ms, rel=0.15)


def test_all_ranks_save_in_the_same_step(tmp_path):
    config = Config(**{**vars(RUN), "plants": (now_and_then("checkpoint", 40.0, ranks=()),)})
    measurement = measured(config, tmp_path)
    assert found(measurement.facts.late) == {}
    cost = measurement.facts.shared.checkpoint
    true_ms = mean_ms(config) - mean_ms(without(config, 0))
    assert cost.ranks is None and cost.ms_per_step == pytest.approx(true_ms, rel=0.1)


def test_a_host_that_runs_ahead_loses_nothing(tmp_path):
    """The device has work for longer than the host stands still."""
    config = Config(
        **{**vars(RUN), "item_every": 0, "queue_depth": 250, "plants": (now_and_then("slow_data", 30.0),)}
    )
    late = found(measured(config, tmp_path).facts.late)
    assert mean_ms(config) - mean_ms(without(config, 0)) < 0.1
    assert late.get("data") is None or late["data"].ms_per_step < 0.2


def test_a_healthy_run(tmp_path):
    measurement = measured(Config(**{**vars(RUN), "jitter": 0.08}), tmp_path)
    assert found(measurement.facts.late) == {}
    assert measurement.facts.shared.checkpoint is None and measurement.facts.shared.collection is None


def test_what_was_caught_up_was_not_lost():
    steps = np.full(60, 10.0)
    stops = np.zeros(60)
    stops[[10, 30, 50]] = 30.0
    lost = steps + stops
    assert lengthening_share(lost, stops) == pytest.approx(1.0)
    caught_up = lost.copy()
    for place in (10, 30, 50):
        caught_up[place + 1 : place + 7] -= 5.0
    assert lengthening_share(caught_up, stops) == pytest.approx(0.0)


@pytest.mark.parametrize(("ranks", "path"), [((0,), "late.checkpoint"), ((0, 1, 2), "shared.checkpoint")])
@pytest.mark.parametrize("world", [2, 3])
def test_a_barrier_behind_each_checkpoint_hides_none(ranks, path, world):
    """Steps with a barrier have a sequence of their own, in all of which the job saves for 40 ms."""
    saving = np.arange(9, 60, 10)
    others = np.setdiff1d(np.arange(60), saving)
    save = np.zeros((len(saving), 2, world))
    save[:, 0, [rank for rank in ranks if rank < world]] = 40.0
    computing = np.array([[0.0], [15.0]])
    barrier = Sync(SyncKind.BARRIER, "barrier", tuple(range(world)))
    job = graph_of(
        cycles_of(reductions(world), work_array(len(others), 1, world, backward=15.0), steps=others),
        cycles_of(
            [barrier, *reductions(world)],
            work_array(len(saving), 2, world, backward=computing, checkpoint=save),
            steps=saving,
        ),
    )
    (cost,) = (costs := rare_costs(RareSource(job, NoLines(), RARE_ON_HOST))).values()
    assert list(costs) == [path] and (cost.steps_hit, cost.period_steps) == (6, 10)
    assert cost.ms_per_step == pytest.approx(40.0 * len(saving) / 60, rel=0.05)
    assert cost.share == pytest.approx(cost.ms_per_step * MS / job.mean_cycle_ns)
