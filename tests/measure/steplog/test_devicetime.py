"""Step logs in device time: the late rank is the one whose device is, however far its host runs ahead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from ddpdoctor.hook.environment import HookOptions
from ddpdoctor.measure.costs import RareSource, rare_costs
from ddpdoctor.measure.facts import Cost, Facts
from ddpdoctor.measure.flow import measure
from ddpdoctor.measure.graph import Recording, build_graphs, graph_of_logs
from ddpdoctor.measure.sourcelines import LogSourceLines
from ddpdoctor.measure.steplog import (
    DeviceTimes,
    Event,
    RankLog,
    Step,
    in_device_time,
    read_rank_log,
)
from ddpdoctor.measure.steplog.devicetime import timed_step
from ddpdoctor.measure.taxonomy import RARE_ON_DEVICE
from ddpdoctor.rundir.reader import RunDirectory
from ddpdoctor.rundir.stepevents import EventKind
from tests.generator import SMALL, Config, generate
from tests.hook.recording import forked, run_recorded
from tests.measure.traced import windows_of


@pytest.fixture(scope="module")
def logs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[RankLog]]:
    """``logs_of(slow)``: what a job recorded whose rank 1 has a device that is slower so often; a job for each."""
    runs: dict[str, str] = {}

    def logs(slow: str) -> list[RankLog]:
        if slow not in runs:
            folder = tmp_path_factory.mktemp(slow)
            job = forked("fake_cuda.py", "--marks", str(folder / "marks"), "--slow", slow)
            found = run_recorded(folder, job, HookOptions(profile_steps=None))
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
    beside = rare_costs(RareSource(graph_of_logs(timed), LogSourceLines(timed), RARE_ON_DEVICE))
    alone = measure(logs, [], {})
    assert any("with CUDA events" in note for note in alone.notes)
    for compute in (alone.facts.late.compute, beside["late.compute"]):
        assert compute is not None and compute.ranks == [1]
        assert compute.occurrence_ms == pytest.approx(18.0, abs=3.0)
        assert compute.ms_per_step == pytest.approx(18.0 / 8, abs=0.6)


@pytest.mark.torchrun
def test_device_times_of_all_ranks_speak_beside_a_window_of_one(logs_of, tmp_path) -> None:
    """Of the other rank the trace is lost: what waits for it in the window looks like transfer."""
    generate(Config(**SMALL, world_size=2, steps=4), tmp_path)
    windows = windows_of(tmp_path)
    logs = logs_of("seldom")
    speakers = [build_graphs(logs, seen).recording for seen in (windows, windows[:1], [])]
    assert speakers == [Recording.WINDOW, Recording.DEVICE_LOG, Recording.DEVICE_LOG]


@pytest.mark.torchrun
@pytest.mark.extended
def test_devices_that_are_equally_fast(logs_of) -> None:
    facts = facts_of(logs_of("never"))
    assert facts.late.compute is None or facts.late.compute.share < 0.05
    assert facts.steps.median_ms == pytest.approx(28.5, abs=1.5)


def test_an_optimizer_with_a_closure_begins_after_its_backward() -> None:
    marks = (("opt", 0), ("fwd", 0), ("fwd_end", 3), ("bwd", 3), ("ready", 8), ("bwd_end", 9), ("opt_end", 10), ("end", 10))  # fmt: skip
    events = [
        Event("opt", 6, 2),
        Event("fwd", 1, 2),
        Event("bwd", 3, 3, module=0, synced=True, ready_ns=(2,), forward_end_ns=3),
        Event("data", 0, 1, loader=0),
    ]
    timed = timed_step(Step(4, 0, 9, tuple(events), (), None, None), DeviceTimes(100, marks))
    assert timed is not None
    step = timed.on_host_clock(0)
    assert (step.start_ns, step.end_ns) == (100, 110)
    assert {event.kind: (step.start_of(event), step.end_of(event)) for event in step.events} == {
        "data": (0, 1),
        "fwd": (100, 103),
        "bwd": (103, 109),
        "opt": (109, 110),
    }
    backward = next(event for event in step.events if event.kind == EventKind.BACKWARD)
    assert step.start_ns + backward.gradients_ready_ns == 108
    # A step that the host saw another way is not moved.
    assert timed_step(Step(4, 0, 9, tuple(events[1:]), (), None, None), DeviceTimes(100, marks)) is None
    assert timed_step(Step(5, 0, 9, tuple(events), (), None, None), None) is None


@pytest.mark.torchrun
def test_steps_without_device_times_are_left_to_the_host(logs_of) -> None:
    first, second = logs_of("never")
    known = {number: times for number, times in second.device_times.items() if number >= 112}
    assert sum(number in known for number in range(120)) == 8
    assert in_device_time([first, replace(second, device_times=known)]) is not None
    known.popitem()
    logs = [first, replace(second, device_times=known)]
    assert in_device_time(logs) is None
    assert measure(logs, [], {}).facts.steps.median_ms is not None
