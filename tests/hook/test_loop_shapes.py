"""The number of recorded steps is the loop's own count, whatever the loop looks like."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from .recording import REPOSITORY, HookOptions, Recorded, forked, plain_environment, run_recorded

SHAPES = [
    "another_optimizer_later", "another_optimizer_instead", "parent_is_used_later", "stepped_from_two_places",
    "step_that_raises_later",
    "new_for_each_step", "new_in_a_helper", "new_for_one_to_three_steps", "new_pair_for_each_round", "new_one_beside_one_that_stays",
    "new_pair_of_which_one_steps_less_often", "new_for_each_layer", "new_with_a_new_model", "new_and_kept",
    "pair_over_the_same_parameters", "pair_after_one_alone",
    "one_optimizer", "accumulation", "accumulation_synced", "gan",
    "two_optimizers_one_backward", "critic_more_often", "two_stages", "optimizer_in_backward", "sharded_optimizer",
    "closure", "scaler_that_skips", "subclass_calling_super", "step_that_raises", "no_ddp", "evaluation_between",
    "own_optimizer_with_marks", "marks_and_optimizer", "join_uneven", "many_short_epochs", "fully_sharded",
    "flat_sharded", "engine_of_its_own", "never_steps",
]  # fmt: skip


Counted = tuple[Recorded, list[dict[str, int]]]
"""What was recorded, and by rank the rounds of each shape."""


def counted(tmp: Path, *options: str) -> Counted:
    base = plain_environment()
    base["PYTHONPATH"] = str(REPOSITORY)
    command = forked("loop_shapes.py", "--out", str(tmp / "counts"), *options)
    recorded = run_recorded(tmp, command, HookOptions(profile_steps=None), base)
    assert recorded.process.returncode == 0, recorded.process.stderr
    return recorded, [json.loads((tmp / f"counts.{rank}").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    return counted(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def thinned(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    return counted(tmp_path_factory.mktemp("thinned"), "--thin")


@pytest.mark.torchrun
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rank", [0, 1])
def test_steps_are_the_loops_own_rounds(job: Counted, name: str, rank: int) -> None:
    recorded, counts = job
    assert list(counts[rank]) == SHAPES
    repeat = SHAPES.index(name)
    steps = recorded.steps(rank, repeat)
    assert len(steps) == counts[rank][name]
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert recorded.info(rank, repeat)["hook"]["errors"] == []
    if name == "closure":
        for step in steps:
            ends = [event["s"] + event["d"] for event in step["ev"] if event["k"] == "bwd"]
            begins = [event["s"] for event in step["ev"] if event["k"] == "opt"]
            assert len(begins) == 1 and begins[0] >= max(ends), "what it takes after its closure"
    starts_and_ends = [tuple(step["t"]) for step in steps]
    assert all(start < end for start, end in starts_and_ends)
    assert all(abs(after[0] - before[1]) < 100_000 for before, after in pairwise(starts_and_ends))


@pytest.mark.extended
@pytest.mark.torchrun
@pytest.mark.parametrize("name", SHAPES)
def test_ranks_that_record_other_steps_in_full_count_alike(thinned: Counted, name: str) -> None:
    recorded, counts = thinned
    repeat = SHAPES.index(name)
    logs = [recorded.steps(rank, repeat) for rank in range(2)]
    for rank, steps in enumerate(logs):
        assert [step["step"] for step in steps] == list(range(len(steps)))
        assert recorded.info(rank, repeat)["hook"]["errors"] == []
        # A round in which optimizers begin to step inside the backward may be lost where it is not looked at.
        assert counts[rank][name] - 1 <= len(steps) <= counts[rank][name]
    if counts[0][name] == counts[1][name]:
        assert len(logs[0]) == len(logs[1])
    if counts[0][name] > 20:
        assert any(step.get("thin") for step in logs[1])


@pytest.mark.torchrun
@pytest.mark.parametrize(
    ("name", "steps_of_each_round"),
    [
        ("new_for_each_step", [1] * 7),
        ("new_pair_for_each_round", [2] * 7),
        ("new_one_beside_one_that_stays", [2] * 7),
        ("new_for_each_layer", [4] * 7),
        ("new_and_kept", [2] + [1] * 5),
        ("pair_over_the_same_parameters", [2] * 7),
        ("pair_after_one_alone", [1] * 3 + [2] * 4),
    ],
)
def test_a_step_ends_with_the_last_optimizer_of_its_round(
    job: Counted, name: str, steps_of_each_round: list[int]
) -> None:
    recorded, _ = job
    for rank in range(2):
        steps = recorded.steps(rank, SHAPES.index(name))
        assert [sum(event["k"] == "opt" for event in step["ev"]) for step in steps] == steps_of_each_round


@pytest.mark.torchrun
def test_only_reduced_backwards_count_as_iterations(job: Counted) -> None:
    recorded, _ = job
    backwards = recorded.events(0, "bwd", SHAPES.index("accumulation"))
    assert [event["sync"] for event in backwards] == [False, False, True] * 7
    assert all(event["ready"] and event["base"] > 0 for event in backwards if event["sync"])


@pytest.mark.torchrun
def test_events_of_special_loops(job: Counted) -> None:
    recorded, _ = job
    skipped = ["o" not in event for event in recorded.events(0, "opt", SHAPES.index("scaler_that_skips"))]
    assert skipped == [True, False, False, True, False, False, True]
    reduced = recorded.events(1, "coll", SHAPES.index("no_ddp"))
    assert len(reduced) == 14
    assert {event["op"] for event in reduced} == {"all_reduce"} and {event["b"] for event in reduced} == {
        16,
        4,
    }
    evaluations = recorded.events(0, "eval", SHAPES.index("evaluation_between"))
    assert [event["n"] for event in evaluations] == [4]
    # In the step that evaluates, not in the one after it.
    assert all(event["s"] > 0 for event in evaluations)
    both = recorded.events(0, "bwd", SHAPES.index("two_optimizers_one_backward"))
    assert all(event["m"] == 0 and event["also"][0]["m"] == 1 for event in both)


@pytest.mark.torchrun
def test_collectives_of_sharded_and_hand_made_data_parallelism(
    job: Counted,
) -> None:
    recorded, _ = job
    for name in ("fully_sharded", "flat_sharded"):
        repeat = SHAPES.index(name)
        operations = {event["op"] for event in recorded.events(0, "coll", repeat)}
        assert any(operation.startswith("all_gather") for operation in operations), (name, operations)
        assert any(operation.startswith("reduce_scatter") for operation in operations), (name, operations)
        assert recorded.info(0, repeat)["fsdp"] is True
    reduced = recorded.events(0, "coll", SHAPES.index("engine_of_its_own"))
    assert [(event["op"], event["b"]) for event in reduced] == [("all_reduce", 20)] * 7
    short = recorded.events(0, "data", SHAPES.index("many_short_epochs"))
    assert [event.get("n") for event in short] == ([2, 2, 1, None] * 7)[:-1]
