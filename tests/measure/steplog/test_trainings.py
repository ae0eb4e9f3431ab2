"""The trainings that the same processes take one after the other, each with a process group of its own."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from ddpdoctor.measure.steplog import Event, RankLog, Step, trainings_of
from ddpdoctor.rundir.reader import RankRecord

MS = 1_000_000
BOTH = [
    {"id": 0, "module": "Small", "parameters_bytes": 8},
    {"id": 1, "module": "Large", "parameters_bytes": 80},
]
ALIKE = [{"id": 0, "where": 1, "module": "Small"}, {"id": 1, "where": 2, "module": "Small"}]


def log(rank, modules, *ends_ms, ddp=BOTH, without=()):
    """Steps of 10 ms, each with a forward pass of its module; process groups were destroyed at ``ends_ms``."""
    steps = [
        Step(
            number, 10 * number * MS, 10 * (number + 1) * MS, (Event("fwd", MS, MS, module=module),), (), 0, 0
        )
        for number, module in enumerate(modules)
        if number not in without
    ]
    samples = np.array([(at * MS, 0, 0, 0) for at in range(0, 10 * len(modules), 5)], np.int64)
    info = {"ddp": ddp, "started_ns": 0, "joining_ns": 0, "ended_ns": 10 * len(modules) * MS}
    ends_ns = [round(end * MS) for end in ends_ms]
    return RankLog(rank, RankRecord("", rank, info), tuple(steps), samples=samples, group_ends_ns=ends_ns)


def test_each_has_its_own_steps_model_and_samples() -> None:
    found = trainings_of([log(rank, [0] * 4 + [1] * 6, 43, 101) for rank in range(2)])
    assert [(each.number, each.first_step, each.steps, each.step_s) for each in found] == [
        (1, 0, 4, 0.01),
        (2, 4, 6, 0.01),
    ]
    first, second = (each.logs[0] for each in found)
    assert [step.number for step in second.steps] == list(range(6))
    assert [each["module"] for each in second.record.info["ddp"]] == ["Large"]
    assert first.record.info["ended_ns"] == 43 * MS and second.record.info["started_ns"] == 43 * MS
    assert "joining_ns" in first.record.info and "joining_ns" not in second.record.info
    assert second.record.info["ended_ns"] == 100 * MS
    assert first.samples[-1, 0] == 40 * MS and second.samples[0, 0] == 45 * MS
    assert (first.follows_training, first.later_trainings_end_ns) == (False, 100 * MS)
    assert (second.follows_training, second.later_trainings_end_ns) == (True, None)


@pytest.mark.parametrize(
    "logs",
    [
        [log(0, [0] * 10, 101)],
        [log(0, [0] * 10, 101, 120)],
        [log(0, [0] * 10)],
        [log(0, [0] * 4 + [1] * 6, 43, ddp=ALIKE)],
    ],
    ids=["it ends", "it ends, and the process too", "it does not end", "alike"],
)
def test_one_training_is_not_divided(logs: list[RankLog]) -> None:
    assert trainings_of(logs) == []


def test_ranks_that_lack_steps_around_the_boundary_are_divided_at_the_same_step() -> None:
    modules = [0] * 6 + [1] * 6
    found = trainings_of([log(0, modules, 62, without=(4, 5)), log(1, modules, 63, without=(6, 7))])
    assert [each.first_step for each in found] == [0, 6]
    assert [[step.number for step in each.steps] for each in found[1].logs] == [[*range(6)], [*range(2, 6)]]


def test_a_rank_that_died_in_the_first_one_has_no_part_in_the_second() -> None:
    found = trainings_of([log(0, [0] * 4 + [1] * 6, 43), log(1, [0] * 3)])
    assert [[each.rank for each in training.logs] for training in found] == [[0, 1], [0]]


def test_what_comes_before_the_end_of_the_group_is_of_the_training_before() -> None:
    """An exhausted loader, a micro-batch that no optimizer step follows; then the next model is made."""
    left_over = Event("fwd", MS, MS, module=0)
    own = Event(
        "bwd",
        6 * MS,
        MS,
        module=1,
        synced=True,
        forward_end_ns=5 * MS,
    )
    made = log(0, [0] * 4 + [1] * 6, 43)
    steps = [replace(step, events=(left_over, own)) if step.number == 4 else step for step in made.steps]
    second = trainings_of([replace(made, steps=steps)])[1]
    assert [each["module"] for each in second.modules] == ["Large"]
    step = second.logs[0].steps[0]
    assert (step.start_ns, step.end_ns) == (43 * MS, 50 * MS)
    (event,) = step.events
    assert (event.start_ns, event.forward_end_ns) == (3 * MS, 2 * MS)


@pytest.mark.parametrize("ddp", [BOTH[:1], []], ids=["the second is not described", "none is"])
def test_trainings_of_unknown_models_are_not_divided(ddp: list[dict[str, object]]) -> None:
    assert trainings_of([log(0, [0] * 4 + [1] * 6, 43, ddp=ddp)]) == []


def test_ranks_that_disagree_are_not_divided() -> None:
    assert trainings_of([log(0, [0] * 4 + [1] * 6, 43), log(1, [0] * 6 + [1] * 4, 63)]) == []


def test_no_time_is_lost_between_groups_that_are_one_training() -> None:
    """Only what comes before a training's own group is another one's."""
    ddp = [*ALIKE, {"id": 2, "module": "Large"}]
    found = trainings_of([log(0, [0] * 4 + [1] * 4 + [2] * 4, 43, 83, ddp=ddp)])
    assert [(each.first_step, each.steps) for each in found] == [(0, 8), (8, 4)]
    assert [step.length_ns for step in found[0].logs[0].steps] == [10 * MS] * 8
    assert found[1].logs[0].steps[0].length_ns == 7 * MS


def test_steps_that_were_not_read_count_for_their_own_training() -> None:
    """Of 4 and 6 steps, 1 and 2 were not read, and rank 1 has lost another one."""
    without = [(2, 5, 6), (2, 5, 6, 8)]
    logs = [
        replace(log(rank, [0] * 4 + [1] * 6, 43, without=lost), left_out=3)
        for rank, lost in enumerate(without)
    ]
    found = trainings_of(logs)
    assert [[each.left_out for each in training.logs] for training in found] == [[1, 1], [2, 2]]
