"""Step logs in device time: the late rank is the one whose device is, however far its host runs ahead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ddpdoctor.hook.environment import HookOptions
from ddpdoctor.measure.devicelog import _moved, in_device_time
from ddpdoctor.measure.facts import Cost, Facts
from ddpdoctor.measure.loggraph import graph_of_logs
from ddpdoctor.measure.loglines import LogLines
from ddpdoctor.measure.measure import measure
from ddpdoctor.measure.points import gradients_ready
from ddpdoctor.measure.rare import DEVICE_KINDS, rare_costs
from ddpdoctor.measure.steplog import DeviceTimes, Event, RankLog, Step, read_rank_log
from ddpdoctor.rundir import RunDirectory
from tests.hook.recording import JOBS, TORCHRUN, run_recorded


@pytest.fixture(scope="module")
def logs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[RankLog]]:
    """``logs_of(slow)``: what a job recorded whose rank 1 has a device that is slower so often; a job for each."""
    runs: dict[str, str] = {}

    def logs(slow: str) -> list[RankLog]:
        if slow not in runs:
            folder = tmp_path_factory.mktemp(slow)
            job = [str(JOBS / "fake_cuda.py"), "--marks", str(folder / "marks"), "--slow", slow]
            found = run_recorded(folder, [*TORCHRUN, "2", *job], HookOptions(profile_steps=None))
            assert found.process.returncode == 0, found.process.stderr
            runs[slow] = str(found.run)
        return [read_rank_log(record) for record in RunDirectory.open(runs[slow]).ranks]

    return logs


def facts_of(logs: list[RankLog]) -> Facts:
    return measure(logs, [], {}).facts


@pytest.mark.torchrun
@pytest.mark.slow
def test_a_device_that_is_always_slower(logs_of) -> None:
    compute = facts_of(logs_of("always")).late.compute
    assert isinstance(compute, Cost) and compute.ranks == [1]
    assert compute.ms_per_step == pytest.approx(18.0, abs=2.0)
    assert compute.typical_ms == pytest.approx(24.0, abs=3.0)


@pytest.mark.torchrun
def test_a_device_that_is_slower_now_and_then(logs_of) -> None:
    """Also beside a profiler window, which showed a few steps and missed it."""
    logs = logs_of("seldom")
    timed = in_device_time(logs)
    assert timed is not None
    beside, _ = rare_costs(graph_of_logs(timed), LogLines(timed), DEVICE_KINDS)
    for compute in (measure(logs, [], {}).facts.late.compute, beside["compute"]):
        assert compute is not None and compute.ranks == [1]
        assert compute.occurrence_ms == pytest.approx(18.0, abs=3.0)
        assert compute.ms_per_step == pytest.approx(18.0 / 8, abs=0.6)


@pytest.mark.torchrun
def test_devices_that_are_equally_fast(logs_of) -> None:
    facts = facts_of(logs_of("never"))
    assert facts.late.compute is None or facts.late.compute.share < 0.05
    assert facts.steps.median_ms == pytest.approx(28.5, abs=1.5)


def test_an_optimizer_with_a_closure_begins_after_its_backward() -> None:
    marks = (("opt", 0), ("fwd", 0), ("fwd_end", 3), ("bwd", 3), ("ready", 8), ("bwd_end", 9), ("opt_end", 10), ("end", 10))  # fmt: skip
    events = [
        Event("opt", 6, 2),
        Event("fwd", 1, 2),
        Event("bwd", 3, 3, m=0, sync=True, ready=[2], base=3),
        Event("data", 0, 1, l=0),
    ]
    step = _moved(Step(4, 0, 9, events, (), None, None), {4: DeviceTimes(100, marks)})
    assert step is not None and (step.start, step.end) == (100, 110)
    assert {event.k: (event.s, event.stop) for event in step.events} == {
        "data": (0, 1),
        "fwd": (100, 103),
        "bwd": (103, 109),
        "opt": (109, 110),
    }
    assert gradients_ready(next(event for event in step.events if event.k == "bwd")) == 108
    # A step that the host saw another way is not moved.
    assert _moved(Step(4, 0, 9, events[1:], (), None, None), {4: DeviceTimes(100, marks)}) is None
    assert _moved(Step(5, 0, 9, events, (), None, None), {4: DeviceTimes(100, marks)}) is None


@pytest.mark.torchrun
def test_steps_without_device_times_are_left_to_the_host(logs_of) -> None:
    logs = logs_of("never")
    for number in range(112):
        logs[1].device_times.pop(number, None)
    assert sum(number in logs[1].device_times for number in range(120)) == 8
    assert in_device_time(logs) is not None
    logs[1].device_times.popitem()
    assert in_device_time(logs) is None
    assert measure(logs, [], {}).facts.steps.median_ms is not None
