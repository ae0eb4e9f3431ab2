"""Jobs that are restarted: the random plans, the ground truth from the job's records, and the marks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.exam import planted
from tests.exam.real import restarts
from tests.exam.score_runs import mark_restarts

S = 1_000_000_000


def test_drawn_ends_are_reachable() -> None:
    """Each end is in a step that its attempt reaches, and the number of restarts is valid."""
    plans = [restarts.drawn(seed) for seed in range(200)]
    for plan in plans:
        first = 0
        for end in plan["ends"]:
            if end["how"] != restarts.EARLY:
                assert first <= end["step"] < plan["steps"] and end["rank"] < plan["world"]
                first = end["step"] - end["step"] % plan["every"] if plan["every"] else 0
        assert plan["restarts"] >= 0
        assert not plan["ends"] or plan["ends"][0]["how"] != restarts.EARLY
    hows = {end["how"] for plan in plans for end in plan["ends"]}
    assert hows == {*restarts.ENDS, restarts.EARLY}
    assert {len(plan["ends"]) for plan in plans} == {0, 1, 2, 3}


@pytest.fixture
def case(tmp_path: Path) -> planted.Case:
    """Two attempts of one rank: 8 steps with a checkpoint after 5, an end before the process group, and 5 more steps from step 5."""
    noted: list[dict[str, Any]] = [{"what": "started", "attempt": 0, "done": 0, "pid": 1, "at_ns": 0}]
    noted += [{"what": "step", "done": n, "at_ns": n * S} for n in range(1, 9)]
    noted.append({"what": "failed", "how": "code", "code": 7, "at_ns": 9 * S})
    noted.append({"what": "failed", "how": "early", "code": 7, "at_ns": 12 * S})
    noted.append({"what": "started", "attempt": 1, "done": 5, "pid": 2, "at_ns": 15 * S})
    noted += [{"what": "step", "done": 5 + n, "at_ns": (15 + n) * S} for n in range(1, 6)]
    (tmp_path / "truth-0.jsonl").write_text("".join(json.dumps(each) + "\n" for each in noted))
    return restarts.truth(3, {"every": 5, "step_ms": 10.0}, tmp_path, 0, {1: 11 * S, 2: 21 * S})


def test_ground_truth_from_the_records(case: planted.Case, tmp_path: Path) -> None:
    costs = {"repeated_steps": 3, "repeated_s": 3.0, "detection_s": 2.0, "start_s": 5.0}
    assert case.shape["costs"] == costs
    assert (case.shape["attempts"], case.shape["restarts"]) == (2, 2)
    assert [fault.kind for fault in case.faults] == ["code"] and case.faults[0].ranks == (0,)
    case.write(tmp_path)
    assert planted.read(tmp_path).shape == case.shape


RIGHT: dict[str, Any] = {
    "job": {"exit_code": 0},
    "findings": [{"rule": "run/restarts", "severity": "warning", "ranks": [0], "costs_ms_per_step": None}],
    "facts": {
        "run": {
            "attempts": [
                {"ended": "rank 0 ended with exit code 7", "ranks": [0]},
                {"ended": "finished normally", "ranks": []},
            ],
            "restarts": {
                "count": 2,
                "repeated_steps": 3,
                "repeated_s": 2.8,
                "detection_s": 2.0,
                "start_s": 5.5,
            },
        }
    },
}


@pytest.mark.parametrize(
    ("path", "value", "wrong"),
    [
        ((), None, set()),
        (("facts", "run", "attempts", 0, "ranks"), [1], {"cause"}),
        (("facts", "run", "attempts", 0, "ended"), "rank 0 ended by SIGTERM", {"cause"}),
        (("facts", "run", "attempts"), [], {"attempts"}),
        (("facts", "run", "restarts"), None, {"attempts", "rule"}),
        (("facts", "run", "restarts", "count"), 1, {"attempts"}),
        (("facts", "run", "restarts", "repeated_steps"), 4, {"repeated"}),
        (("facts", "run", "restarts", "start_s"), 7.5, {"seconds"}),
        (("job", "exit_code"), 1, {"exit"}),
        (("findings", 0, "rule"), "hang/rank-died", {"exit"}),
        (("findings", 0, "rule"), "run/pause", {"silence"}),
    ],
)
def test_wrong_answers_are_marked_wrong(
    case: planted.Case, path: tuple[Any, ...], value: Any, wrong: set[str]
) -> None:
    diagnosis = copy.deepcopy(RIGHT)
    if path:
        place: Any = diagnosis
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
    mark = mark_restarts(case, diagnosis)
    assert {what for what in mark.asked if mark.right[what] < mark.asked[what]} == wrong
