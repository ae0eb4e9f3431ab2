"""Waiting for data: in the whole run rather than in a window of few steps, and as a limit of what other changes can save."""

import numpy as np
import pytest

from ddpdoctor.analysis import Options, prepare
from ddpdoctor.measure.attribution import attribute
from ddpdoctor.measure.costs import Context, RareSource, costs_under, price_all
from ddpdoctor.measure.flow import measure
from ddpdoctor.measure.taxonomy import RARE_ON_DEVICE
from tests.generator import SMALL, Config, Plant, When
from tests.generator.rundirectory import generate_run
from tests.measure.costs.test_rare import mean_ms, measured
from tests.measure.made import NoLines, simple
from tests.measure.traced import found

USUAL_MS = {"transfer_ms": 0.0, "forward": 20.0, "backward": 10.0}


def priced(window, run=None, **more):
    whole = None if run is None else RareSource(run, NoLines(), RARE_ON_DEVICE)
    step_ms = (run or window).mean_cycle_ns / 1e6
    context = Context(
        window, attribute(window), NoLines(), mean_step_ms=step_ms, host_timed=False, device_run=whole, **more
    )
    return costs_under("shared", price_all(context))


@pytest.mark.parametrize("late_in_window", [0, 1, 3, 5])
def test_a_batch_that_is_late_every_other_step_is_priced_from_the_whole_run(late_in_window):
    """Two workers that take 130 ms for a batch, beside a step of 30 ms: every other step waits for 100 ms."""
    window = simple(
        1, cycles=5, data=np.where(np.arange(5) < late_in_window, 100.0, 0.0)[:, None, None], **USUAL_MS
    )
    run = simple(1, cycles=200, data=np.where(np.arange(200) % 2, 100.0, 0.0)[:, None, None], **USUAL_MS)
    cost = priced(window, run)["data"]
    assert cost.ms_per_step == pytest.approx(50.0)
    assert (cost.low_ms_per_step, cost.high_ms_per_step) == (
        pytest.approx(50.0, rel=0.3),
        pytest.approx(50.0, rel=0.3),
    )
    assert (cost.persistence, cost.steps_seen) == ("periodic", 200)


def test_a_run_without_device_time_is_priced_from_its_window():
    assert priced(simple(1, data=15.0, **USUAL_MS))["data"].ms_per_step == pytest.approx(15.0)


def test_other_changes_save_no_more_than_the_workers_leave():
    """The workers take 95 ms for the batch of a step of 100 ms, so no step can be more than 5 ms shorter unless they are faster."""
    job = simple(1, data=50.0, launch=20.0, **USUAL_MS)
    assert priced(job)["launch"].ms_per_step == pytest.approx(20.0)
    costs = priced(job, loader_limit_ms=95.0)
    assert costs["launch"].ms_per_step == pytest.approx(5.0)
    assert costs["launch"].speedup == pytest.approx(100 / 95)
    assert costs["data"].ms_per_step == pytest.approx(50.0)
    assert priced(job, loader_limit_ms=70.0)["launch"].ms_per_step == pytest.approx(20.0)


RUN = Config(**SMALL, warmup_steps=60, steps=5, device_times=True)
"""60 steps before a window of five, with CUDA events."""


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("ms", "every"), [(5.0, 1), (20.0, 1), (30.0, 2), (60.0, 4)])
def test_waits_of_a_simulated_run_cost_what_the_device_waits(tmp_path, ms, every, ahead):
    """A wait of 5 ms costs a host that runs ahead nothing, and a longer one only what the queue does not hide. A third of that
    may be told as host work: the launches after a wait, which would be hidden without it."""
    plant = Plant("slow_data", ranks=(0, 1, 2, 3), ms=ms, when=When(first=-60, every=every))
    more = {"item_every": 0 if ahead else 1, "queue_depth": 250}
    config = Config(**{**vars(RUN), **more, "plants": (plant,)})
    healthy = Config(**{**vars(RUN), **more})
    measurement = measured(config, tmp_path)
    assert found(measurement.facts.late) == {}
    true_ms = mean_ms(config) - mean_ms(healthy)
    low, high = (0.64 if ahead else 0.87) * true_ms - 0.3, 1.1 * true_ms + 0.3
    assert low <= measurement.facts.shared.data.ms_per_step <= high
    assert (true_ms < 0.1) == (ahead and ms == 5.0)


@pytest.mark.parametrize("windows", [True, False], ids=["window", "events only"])
@pytest.mark.parametrize(
    ("kind", "cause", "ms", "every", "item_every"),
    [
        ("checkpoint", "checkpoint", 11.0, 3, 3),
        ("checkpoint", "checkpoint", 5.0, 3, 0),
        ("slow_data", "data", 6.0, 1, 3),
        ("slow_data", "data", 40.0, 4, 1),
        ("slow_h2d", "compute", 5.0, 3, 3),
    ],
)
def test_a_stall_of_one_rank_is_priced_in_device_time(tmp_path, kind, cause, ms, every, item_every, windows):
    """The window of five steps has it more or less often than the run. The clock of a device is tied to its host's by the events that the
    device reaches while it waits for the host. A copy counts as a slow step of the device, as no event tells its cause."""
    config = Config(**{**vars(RUN), "warmup_steps": 120, "item_every": item_every})
    stalled = Config(
        **{**vars(config), "plants": (Plant(kind, ranks=(1,), ms=ms, when=When(first=-120, every=every)),)}
    )
    generate_run(stalled, tmp_path / "run")
    if not windows:
        for trace in (tmp_path / "run").glob("ranks/*/trace.json.gz"):
            trace.unlink()
    prepared = prepare([str(tmp_path / "run")], Options(cache=False, jobs=1))
    measurement = measure(prepared.logs, prepared.windows, {})
    late = found(measurement.facts.late)
    named = {cause, "total"} if kind != "slow_h2d" else {"host", "total"}
    assert set(late) == named and late["total"].ms_per_step == pytest.approx(
        late[min(named)].ms_per_step, rel=0.01
    )
    true_ms = mean_ms(stalled) - mean_ms(config)
    assert late["total"].ms_per_step == pytest.approx(true_ms, rel=0.15)
    assert late[min(named)].ranks == [1]
