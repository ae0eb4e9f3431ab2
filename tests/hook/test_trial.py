"""Settings that a trial changes in real ranks, read back from what they were set in; and the trial's end."""

from __future__ import annotations

import json
import statistics
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from ddpdoctor.experiment.judging import parity
from ddpdoctor.experiment.running import Trial
from ddpdoctor.experiment.settings import ENVIRONMENT, SETTINGS, Results
from ddpdoctor.hook.environment import TRIAL, HookOptions
from ddpdoctor.hook.trial import NAMES

from .recording import Recorded, forked, plain_environment, run_recorded

pytestmark = [pytest.mark.torchrun]


WITHOUT_NCCL = pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL, and takes the hook")


def tried(tmp_path, settings: dict[str, Any], *arguments: str, steps: int = 12) -> Recorded:
    base = plain_environment(**{TRIAL: json.dumps({"set": settings, "steps": steps})})
    return run_recorded(tmp_path, forked("tried.py", *arguments), HookOptions(profile_steps=None), base)


def trials(recorded: Recorded) -> list[dict[str, Any]]:
    assert recorded.process.returncode == 0, recorded.process.stderr
    return [recorded.info(rank)["trial"] for rank in (0, 1)]


def states(trial: dict[str, Any]) -> dict[str, str]:
    return {name: change["state"] for name, change in trial["changes"].items()}


def test_settings_of_both_sides_are_the_same():
    assert set(NAMES) == {name for name in SETTINGS if not name.startswith(ENVIRONMENT)}


def test_the_job_ends_between_two_steps_on_all_ranks(tmp_path):
    found = trials(tried(tmp_path, {}))
    assert [trial["steps"] for trial in found] == [12, 12]
    assert all(trial["ended"] for trial in found)
    assert not (tmp_path / "END").exists()
    assert found[0]["parameters"]["sha256"] == found[1]["parameters"]["sha256"]
    assert len(found[0]["losses"]) == 12


def test_arguments_of_constructors_are_changed_and_read_back(tmp_path):
    asked = {
        "loader.num_workers": 2,
        "loader.prefetch_factor": 3,
        "loader.persistent_workers": True,
        "ddp.bucket_cap_mb": 1.0,
        "ddp.gradient_as_bucket_view": True,
        "ddp.find_unused_parameters": False,
        "ddp.broadcast_buffers": False,
        "optimizer.foreach": True,
        "torch.threads": 2,
    }
    recorded = tried(tmp_path, asked)
    for rank, trial in enumerate(trials(recorded)):
        assert set(states(trial).values()) == {"applied"}, trial["changes"]
        info = recorded.info(rank)
        assert info["loaders"][0]["num_workers"] == 2
        assert info["ddp"][0]["gradient_as_bucket_view"]
        assert not info["ddp"][0]["find_unused_parameters"]
        assert trial["changes"]["loader.num_workers"]["was"] == 0


def test_workers_and_bucket_views_leave_every_bit_as_it_was(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain = trials(tried(tmp_path / "a", {}))
    changed = trials(tried(tmp_path / "b", {"loader.num_workers": 2, "ddp.gradient_as_bucket_view": True}))
    assert plain[0]["parameters"] == changed[0]["parameters"]
    assert plain[0]["losses"] == changed[0]["losses"]


@pytest.mark.parametrize(
    ("setting", "arguments", "why"),
    [
        ({"loader.pin_memory": True}, [], "no accelerator"),
        ({"ddp.comm_hook": "fp16"}, ["--own-hook"], "hook of its own"),
        pytest.param({"ddp.comm_hook": "bf16"}, [], "NCCL", marks=WITHOUT_NCCL),
        ({"ddp.accumulate": True}, [], "one backward"),
        ({"torch.matmul_precision": "high"}, ["--own-precision"], "RuntimeError"),
    ],
)
def test_what_cannot_be_changed_is_refused_and_the_job_left_as_it_is(tmp_path, setting, arguments, why):
    found = trials(tried(tmp_path, setting, *arguments))
    for trial in found:
        (change,) = trial["changes"].values()
        assert change["state"] == "refused"
        assert why in change["why"]
        assert trial["ended"]


@pytest.mark.parametrize(
    ("setting", "arguments"),
    [
        ({"loader.num_workers": 2}, ["--sharded"]),
        ({"ddp.comm_hook": "fp16"}, []),
        ({"ddp.no_sync": True}, []),
        ({"ddp.accumulate": True}, ["--micro", "2"]),
        ({"amp.autocast": "bf16"}, []),
        ({"sync.barriers": "skip"}, ["--barrier"]),
        ({"optimizer.fused": True}, []),
        ({"torch.matmul_precision": "high"}, []),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_set_around_calls_is_applied(tmp_path, setting, arguments):
    for trial in trials(tried(tmp_path, setting, *arguments)):
        assert set(states(trial).values()) == {"applied"}, trial["changes"]


def test_accumulation_reduces_in_the_last_micro_batch_alone(tmp_path):
    recorded = tried(tmp_path, {"ddp.accumulate": True}, "--micro", "2", steps=10)
    trials(recorded)
    reduced = [
        [event.get("sync") for event in step.get("ev", []) if event["k"] == "bwd"]
        for step in recorded.steps(0)
    ]
    full = [step for step in reduced[-4:] if len(step) == 2]
    assert full and all(step == [False, True] for step in full), reduced


def test_instant_data_takes_the_wait_away(tmp_path):
    recorded = tried(tmp_path, {"loader.instant": True}, "--wait-ms", "2", steps=30)
    assert states(trials(recorded)[0]) == {"loader.instant": "applied"}
    lengths = [end - start for start, end in (step["t"] for step in recorded.steps(0))]
    assert statistics.median(lengths[-10:]) < 0.6 * statistics.median(lengths[1:7])


def parity_of(tmp_path, settings: dict[str, Any], *arguments: str):
    """Of two trials of the job as it is, and one with the settings."""
    found = []
    for number, chosen in enumerate(({}, {}, settings)):
        (tmp_path / str(number)).mkdir()
        first = trials(tried(tmp_path / str(number), chosen, *arguments))[0]
        assert set(states(first).values()) <= {"applied"}, first
        found.append(Trial(np.ones(3), {}, first["parameters"], first["losses"], 1.0))
    results = max((SETTINGS[name].results for name in settings), key=list(Results).index)
    return parity(found[:2], found[2:], results)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("settings", "arguments", "same", "says"),
    [
        (
            {"loader.num_workers": 2, "ddp.gradient_as_bucket_view": True},
            [],
            True,
            "the same to the last bit",
        ),
        ({"ddp.accumulate": True}, ["--micro", "2"], False, "in their last bits"),
        ({"loader.num_workers": 2}, ["--draws", "item"], False, "random numbers that workers draw"),
        ({"loader.num_workers": 2}, ["--draws", "worker"], False, "random numbers that workers draw"),
        ({"loader.num_workers": 2}, ["--draws", "sampler"], False, "something in the job depends on it"),
    ],
    ids=["hash", "norm", "random-items", "seeded-workers", "sampler-that-follows-training"],
)
def test_what_becomes_of_the_model_is_told_by_hash_or_by_norm(tmp_path, settings, arguments, same, says):
    """Of settings that leave each bit, that round otherwise, and that change what a job draws: in each item, by a script that
    seeds each worker, and with a sampler that follows the training that a queue runs ahead of."""
    found = parity_of(tmp_path, settings, *arguments)
    assert found is not None
    assert (found.same_bits, found.unexpected) == (same, not same and "loader.num_workers" in settings)
    assert says in found.says
    assert found.norm_differs is not None
    assert (found.norm_differs < 1e-6) == ("loader.num_workers" not in settings or same)
    assert found.losses
    if same or found.unexpected:
        assert same == all(ours == theirs for ours, theirs in found.losses)


def test_a_job_without_a_loader_has_nothing_to_change(tmp_path):
    found = trials(tried(tmp_path, {"loader.num_workers": 2}, "--no-loader"))
    assert [states(trial) for trial in found] == [{"loader.num_workers": "not seen"}] * 2
    assert all(trial["ended"] for trial in found)


def test_every_loader_of_a_job_is_changed(tmp_path):
    recorded = tried(tmp_path, {"loader.num_workers": 1}, "--second")
    for rank, trial in enumerate(trials(recorded)):
        assert set(states(trial).values()) == {"applied"}
        assert [each["num_workers"] for each in recorded.info(rank)["loaders"]] == [1, 1]


def test_ranks_may_disagree_on_what_can_be_changed(tmp_path):
    found = trials(tried(tmp_path, {"loader.num_workers": 2}, "--iterable-on", "1"))
    assert [states(trial)["loader.num_workers"] for trial in found] == ["applied", "refused"]


def test_a_job_that_ends_before_its_trial(tmp_path):
    found = trials(tried(tmp_path, {}, "--batches", "6", steps=50))
    assert (tmp_path / "END").exists()
    assert [(trial["steps"], trial["ended"]) for trial in found] == [(6, False)] * 2


def test_without_the_variable_nothing_is_changed(tmp_path):
    recorded = run_recorded(tmp_path, forked("tried.py", "--batches", "4"), HookOptions(profile_steps=None))
    assert "trial" not in recorded.info(0)
    assert (tmp_path / "END").exists()
