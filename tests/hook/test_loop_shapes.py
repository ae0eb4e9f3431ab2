"""The number of recorded steps is the loop's own count, whatever the loop looks like."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from .recording import REPOSITORY, Recorded, plain_environment, run_recorded, torchrun

SHAPES = [
    "one_optimizer", "accumulation", "accumulation_synced", "gan", "two_optimizers_one_backward", "critic_more_often",
    "two_stages", "optimizer_in_backward", "sharded_optimizer", "closure", "scaler_that_skips", "subclass_calling_super",
    "step_that_raises", "no_ddp", "evaluation_between", "own_optimizer_with_marks", "marks_and_optimizer", "join_uneven",
    "many_short_epochs", "fully_sharded", "flat_sharded", "engine_of_its_own", "never_steps",
]  # fmt: skip


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorded, list[dict[str, int]]]:
    tmp = tmp_path_factory.mktemp("shapes")
    base = plain_environment()
    base["PYTHONPATH"] = str(REPOSITORY)
    recorded = run_recorded(tmp, torchrun("loop_shapes.py", "--out", str(tmp / "counts")), base=base)
    assert recorded.process.returncode == 0, recorded.process.stderr
    return recorded, [json.loads((tmp / f"counts.{rank}").read_text()) for rank in range(2)]


@pytest.mark.torchrun
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rank", [0, 1])
def test_steps_are_the_loops_own_rounds(
    job: tuple[Recorded, list[dict[str, int]]], name: str, rank: int
) -> None:
    recorded, counts = job
    assert list(counts[rank]) == SHAPES
    repeat = SHAPES.index(name)
    steps = recorded.steps(rank, repeat)
    assert len(steps) == counts[rank][name]
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert recorded.info(rank, repeat)["hook"]["errors"] == []
    starts_and_ends = [tuple(step["t"]) for step in steps]
    assert all(start < end for start, end in starts_and_ends)
    assert all(abs(after[0] - before[1]) < 100_000 for before, after in pairwise(starts_and_ends))


@pytest.mark.torchrun
def test_only_reduced_backwards_count_as_iterations(job: tuple[Recorded, list[dict[str, int]]]) -> None:
    recorded, _ = job
    backwards = recorded.events(0, "bwd", SHAPES.index("accumulation"))
    assert [event["sync"] for event in backwards] == [False, False, True] * 7
    assert all(event["ready"] and event["base"] > 0 for event in backwards if event["sync"])


@pytest.mark.torchrun
def test_events_of_special_loops(job: tuple[Recorded, list[dict[str, int]]]) -> None:
    recorded, _ = job
    skipped = [
        event.get("skipped", False) for event in recorded.events(0, "opt", SHAPES.index("scaler_that_skips"))
    ]
    assert skipped == [True, False, False, True, False, False, True]
    reduced = recorded.events(1, "coll", SHAPES.index("no_ddp"))
    assert len(reduced) == 14
    assert {event["op"] for event in reduced} == {"all_reduce"} and {event["b"] for event in reduced} == {
        16,
        4,
    }
    closures = recorded.events(0, "opt", SHAPES.index("closure"))
    assert all(event["closure"] for event in closures)
    evaluations = recorded.events(0, "eval", SHAPES.index("evaluation_between"))
    assert [event["n"] for event in evaluations] == [4]
    # In the step that evaluates, not in the one after it.
    assert all(event["s"] > 0 for event in evaluations)
    both = recorded.events(0, "bwd", SHAPES.index("two_optimizers_one_backward"))
    assert all(event["m"] == 0 and event["also"][0]["m"] == 1 for event in both)


@pytest.mark.torchrun
def test_collectives_of_sharded_and_hand_made_data_parallelism(
    job: tuple[Recorded, list[dict[str, int]]],
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
