"""Whether a loader without workers computes its batches, or waits for them."""

from __future__ import annotations

import pytest

from ddpdoctor.hook.environment import HookOptions

from .recording import Recorded, forked, run_recorded

pytestmark = [pytest.mark.torchrun]


def batches(recorded: Recorded) -> list[dict[str, int]]:
    assert recorded.process.returncode == 0, recorded.process.stderr
    return [event for event in recorded.events(0, "data") if "z" in event]


def asleep_share(told: list[dict[str, int]]) -> float:
    return sum(event["z"] for event in told) / sum(event["d"] for event in told)


@pytest.mark.parametrize(("arguments", "asleep"), [(["--wait-ms", "6"], True), (["--busy-ms", "2"], False)])
def test_a_loader_that_waits_is_told_from_one_that_computes(tmp_path, arguments, asleep):
    command = forked("tried.py", "--batches", "60", *arguments, ranks=1)
    told = batches(run_recorded(tmp_path, command, HookOptions(profile_steps=None)))
    assert len(told) >= 5
    assert all(0 <= event["z"] <= event["d"] for event in told)
    assert (asleep_share(told) > 0.6) is asleep


@pytest.mark.extended
def test_of_workers_nothing_is_told(tmp_path):
    command = forked("plain_ddp.py", "--workers", "1", "--steps", "60", ranks=1)
    recorded = run_recorded(tmp_path, command, HookOptions(profile_steps=None))
    assert batches(recorded) == []
    assert recorded.info(0)["loaders"][0]["num_workers"] == 1
