"""Jobs whose optimizer steps inside DDP's forward are measured as any other: the backward and its reductions are in there."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ddpdoctor import analyze

from .recording import Recorded, forked, run_recorded

pytestmark = [pytest.mark.torchrun, pytest.mark.alone]
STEPS, LATE_MS = 30, 30.0


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorded, int]:
    tmp = tmp_path_factory.mktemp("inside")
    more = ["--updates", str(request.param), "--steps", str(STEPS), "--late-ms", str(LATE_MS)]
    recorded = run_recorded(tmp, forked("steps_in_forward.py", *more))
    assert recorded.process.returncode == 0, recorded.process.stderr
    return recorded, request.param


@pytest.mark.parametrize("rank", [0, 1])
def test_what_comes_before_each_backward_is_its_forward(job: tuple[Recorded, int], rank: int) -> None:
    recorded, updates = job
    steps = recorded.steps(rank)
    assert len(steps) == STEPS and recorded.info(rank)["hook"]["errors"] == []
    for step in steps[1:]:
        events = [event for event in step["ev"] if event["k"] != "gc"]  # Python collects when it likes
        assert [event["k"] for event in events] == ["fwd", "bwd", "opt"] * updates
        assert all(a["s"] + a["d"] <= b["s"] for a, b in pairwise(events))
        for forward, backward in zip(events[::3], events[1::3], strict=True):
            assert forward["s"] >= 0 and forward["e"] == 32 * 64
            assert forward["d"] >= LATE_MS * 1e6 * rank
            assert backward["sync"] and backward["base"] >= forward["s"] + forward["d"]
            assert backward["base"] + backward["ready"][0] <= backward["s"] + backward["d"]


def test_the_late_rank_is_named(job: tuple[Recorded, int]) -> None:
    recorded, updates = job
    diagnosis = analyze(str(recorded.run))
    assert diagnosis.steps.measured >= STEPS - 15
    assert not diagnosis.healthy and diagnosis.findings[0].ranks == [1]
    cost_ms = diagnosis.findings[0].costs_ms_per_step
    assert cost_ms is not None and cost_ms == pytest.approx(LATE_MS * updates, rel=0.25)
