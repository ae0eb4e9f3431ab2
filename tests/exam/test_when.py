"""Work at random times of a run: the schedule, the job's records, and the marks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exam import planted
from tests.exam.__main__ import main
from tests.exam.planted import Case, Fault, When
from tests.exam.real import when
from tests.exam.real.draw import program
from tests.exam.real.kinds import Asked
from tests.exam.score_runs import mark_when


@pytest.mark.parametrize("how", when.PATTERNS)
def test_the_schedule_follows_the_drawn_time(how: str) -> None:
    every, amounts = when.schedule(random.Random(f"{how} 3"), how, 0.015)
    given = [step for step, amount in enumerate(amounts) if amount]
    expected = {
        "always": list(range(when.STEPS)),
        "every n-th": list(range(given[0], when.STEPS, every or 1)),
        "since": list(range(given[0], when.STEPS)),
        "until": list(range(given[-1] + 1)),
        "growing": list(range(1, when.STEPS)),
        "once": given[:1],
        "twice": given[:2],
    }
    assert given == expected[how] and (every is None) == (how != "every n-th")
    assert sorted(amounts) == amounts or how != "growing"


@pytest.mark.parametrize("kind", when.KINDS_OF_WORK)
def test_the_job_records_its_seconds_by_step(kind: str, tmp_path: Path) -> None:
    drawn = program(4, tmp_path, Asked(kind, {"model": "accelerator"}, noted=True))
    extras = json.loads((tmp_path / "plan.json").read_text())["extras"]
    ranks = range(drawn.world) if drawn.faults[0].ranks is None else drawn.faults[0].ranks
    for rank in ranks:
        noted_s = np.zeros(when.STEPS)
        noted_s[[7, 9]] = 0.75, 1.0
        noted_s.tofile(tmp_path / f"planted-{rank}")
    (tmp_path / "twin.json").write_text('{"base_ms": 20.0}')
    case = when.truth(drawn, "since", None, {"extras": extras}, tmp_path)
    (fault,) = case.faults
    assert fault.when is not None and fault.when.seconds == (1.75, 1.75)
    first = 7 + (extras["a"]["site"] == "after")
    assert fault.when.steps == (first, first + 2)
    case.write(tmp_path)
    assert planted.read(tmp_path) == case


FINDING: dict[str, Any] = {
    "severity": "warning",
    "ranks": [1],
    "where": [{"file": "/job/train.py", "line": 7}],
    "costs_ms_per_step": None,
    "persistence": None,
    "steps": None,
    "explanation": "",
}
CHANGE = {
    "steps": [303, 398],
    "kind": "host",
    "every": None,
    "before_ms": 20.0,
    "after_ms": 30.0,
    "total_s": 1.1,
}
PERIODIC = {"steps": [13, 393], "kind": "host", "every": 10, "total_s": 1.1}
OF_STEPS = {**FINDING, "rule": "rank-imbalance/host-work", "costs_ms_per_step": 2.5, "steps": [301, 398]}


def marked(how: str, findings: list[dict[str, Any]], **run: Any) -> set[str]:
    """The wrong marks of ``findings`` for work since step 300, or in every 10th step."""
    ends = (3, 393) if how == "every n-th" else (300, 398)
    planned = When(how, "host", ends, 399, (1.0, 1.0), 10 if how == "every n-th" else None)
    fault = Fault(
        "host-one", ("rank-imbalance/host-work",), (1,), 2.5, lines=(("train.py", 7),), when=planned
    )
    diagnosis = {
        "job": {"ranks_seen": [0, 1], "duration_s": 30.0},
        "steps": {"count": 399},
        "findings": findings,
        "facts": {"run": {"wall_s": 30.0, "start_s": 20.0, "steps_s": 9.9, "end_s": None, **run}},
    }
    mark = mark_when(Case(1, "when", 20.0, (fault,)), diagnosis)
    return {what for what in mark.asked if mark.right[what] < mark.asked[what]}


@pytest.mark.parametrize(
    ("event", "finding", "wrong"),
    [
        ({}, {}, set()),
        ({"kind": "data"}, {}, {"rule", "when", "silence"}),
        ({}, {"ranks": [0]}, {"rank"}),
        ({}, {"where": [{"file": "train.py", "line": 9}]}, {"line"}),
        ({"steps": [290, 398]}, {}, {"when"}),
        ({"after_ms": 10.0}, {}, {"when"}),
        ({"total_s": 1.3}, {}, {"seconds"}),
    ],
)
def test_wrong_answers_on_a_change_are_marked_wrong(
    event: dict[str, Any], finding: dict[str, Any], wrong: set[str]
) -> None:
    told = {**FINDING, "rule": "run/step-time-changed", **finding}
    assert marked("since", [told], change={**CHANGE, **event}) == wrong


@pytest.mark.parametrize(("every", "wrong"), [(10, set()), (9, {"when"})])
def test_a_period_is_reported_with_its_length(every: int, wrong: set[str]) -> None:
    told = {**FINDING, "rule": "run/every-nth-step"}
    assert marked("every n-th", [told], periodic={**PERIODIC, "every": every}) == wrong
    rare = {**OF_STEPS, "steps": [3, 393], "persistence": "periodic", "explanation": f"every {every} steps,"}
    assert marked("every n-th", [rare]) == wrong


def test_other_findings_may_report_the_steps_and_the_account_adds_up() -> None:
    assert not marked("since", [{**OF_STEPS, "persistence": "range"}])
    assert marked("since", [{**OF_STEPS, "persistence": "always", "steps": None}]) == {"when", "rate"}
    assert marked("since", [{**OF_STEPS, "persistence": "range"}], end_s=1.0) == {"account"}
    assert marked("since", []) == {"rule", "when"}


@pytest.mark.torchrun
@pytest.mark.extended
def test_a_job_is_recorded_and_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(when, "STEPS", 90)
    kept, marks = tmp_path / "kept", tmp_path / "marks.json"
    assert main(["--seed", "1", "--when", "1", "--record", str(kept)]) == 0
    assert main(["--judge", str(kept), "--json", str(marks)]) == 0
    assert "when: 1 cases" in capsys.readouterr().out
    (case,) = json.loads(marks.read_text())["cases"]
    assert (case["seed"], case["half"], case["kinds"]) == (1, "when", ["since"])
