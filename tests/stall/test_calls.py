"""Ranks that called what does not go together, in jobs that Gloo ended for it: by what each rank had written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.analysis import analyze
from tests.measure.steplogs import lines_of, steps_of, write_lines

from .recorded import FIRST_PID, NOW_NS, TORCH, TRAIN, Stopped, main_finding

SMALL = {"op": "all_reduce", "b": 64, "w": 90}
LARGE = {"op": "all_reduce", "b": 200_000, "w": 91}
OTHER = {"op": "all_reduce", "b": 12_000, "w": 92}
BROADCAST = {"op": "broadcast", "b": 64, "w": 93}
BACKWARD = {"k": "bwd", "w": 94}
LINES = {90: 50, 91: 51, 92: 57, 93: 58, 94: 40}
"""Lines of the script by the numbers of the log."""
ABORTED = (
    "Fatal Python error: Aborted\n\nThread 0x00007f01 (most recent call first):\n"
    '  File "{torch}/distributed/distributed_c10d.py", line 3000 in all_reduce\n  File "{file}", line {line} in train\n'
)


class Called(Stopped):
    """A run of which all ranks number their calls: two metrics' reductions in every step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for path in folder.glob("ranks/*/steps.jsonl"):
            lines = lines_of(path)
            places = [{"where": n, "file": TRAIN, "line": line, "function": "f"} for n, line in LINES.items()]
            write_lines(path, [lines[0], *places, *lines[1:]])
        self.step = max(line["step"] for line in lines if "step" in line) + 1

    def called(self, rank: int, *calls: dict[str, Any], first: bool = False) -> Called:
        """What a rank called last, of which the last call has not returned; in the ``first`` step, or after those of the step before."""
        rows, last = [], dict[int, tuple[int, int]]()
        if not first:
            last = {SMALL["w"]: (38, 35), LARGE["w"]: (39, 36), BACKWARD["w"]: (40, 37)}
            calls = (SMALL, LARGE, BACKWARD, *calls)
        for turn, call in enumerate(calls, start=1 if first else 41):
            before = last.get(call["w"], (0, 0))
            last[call["w"]] = turn, before[0]
            step = 0 if first else self.step - (turn < 44)
            rows.append(
                {
                    "open": 0,
                    "call": turn,
                    "n": turn,
                    "p": before[0],
                    "pp": before[1],
                    "step": step,
                    "k": "coll",
                    "pg": "0",
                }
                | call
            )
        rows[-1]["open"] = 1
        (self.path / f"ranks/{rank:05d}/calls.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
        return self

    def aborted(self, rank: int, line: int, others: tuple[int, ...]) -> Called:
        """Gloo ended this rank, and torchrun the others."""
        text = ABORTED.format(torch=TORCH, file=TRAIN, line=line)
        (self.path / f"ranks/{rank:05d}/faults.txt").write_text(text)
        self.ended(rank, signal=6, step=self.step)
        for other in others:
            self.ended(other, signal=15, step=self.step, seen_ns=NOW_NS)
        return self


@pytest.mark.parametrize(
    ("calls", "kind", "line"),
    [
        ([LARGE], "order", 51),
        ([OTHER], "shape", 57),
        ([BROADCAST], "operation", 58),
        ([SMALL, BROADCAST], "operation", 58),
    ],
    ids=["order", "shape", "operation", "later"],
)
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.extended)])
def test_who_calls_otherwise_than_in_the_steps_before(tmp_path, calls, kind, line, victim) -> None:
    """Whichever of the two Gloo ends."""
    run = Called(tmp_path / "run")
    usual = [SMALL, LARGE][: len(calls)]
    run.called(0, *usual).called(1, *calls)
    lines = (LINES[usual[-1]["w"]], line)
    diagnosis = analyze([str(run.aborted(victim, lines[victim], (1 - victim,)).path)])
    finding = main_finding(diagnosis)
    assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/different-collectives", [1], line)
    stop = diagnosis.facts["hang"]["different"]
    assert (stop["kind"], stop["waiting_ranks"], stop["waits_at"][0]["line"]) == (kind, [0], lines[0])
    assert diagnosis.verdict.headline.startswith("The job failed: rank 1 calls ")


def test_of_three_the_two_that_do_alike_are_right_without_any_step_before(tmp_path) -> None:
    """Nothing of the steps before is known, as in the first one."""
    run = Called(tmp_path / "run")
    third = run.path / "ranks/00002"
    third.mkdir()
    for rank in range(3):
        info = json.loads((run.path / f"ranks/{min(rank, 1):05d}/rank.json").read_text())
        info |= {"rank": rank, "pid": FIRST_PID + rank, "world_size": 3}
        (run.path / f"ranks/{rank:05d}/rank.json").write_text(json.dumps(info))
    (third / "steps.jsonl").write_text((run.path / "ranks/00001/steps.jsonl").read_text())
    for path in run.path.glob("ranks/*/steps.jsonl"):
        write_lines(path, [line for line in lines_of(path) if not line.get("ev")])
    run.step = max((line["step"] for line in steps_of(run.path, 0)), default=-1) + 1
    for rank, call in enumerate((SMALL, SMALL, OTHER)):
        run.called(rank, call, first=True)
    finding = main_finding(analyze([str(run.aborted(0, 50, (1, 2)).path)]))
    assert (finding.rule, finding.ranks) == ("hang/different-collectives", [2])


@pytest.mark.parametrize(
    ("first", "second"),
    [([SMALL], [SMALL]), ([SMALL, LARGE], [SMALL, LARGE]), ([SMALL], [SMALL, LARGE])],
    ids=["alike", "later alike", "one behind"],
)
def test_an_abort_while_all_call_what_they_always_do_is_a_death(tmp_path, first, second) -> None:
    run = Called(tmp_path / "run").called(0, *first).called(1, *second)
    finding = main_finding(analyze([str(run.aborted(1, LINES[second[-1]["w"]], (0,)).path)]))
    assert (finding.rule, finding.ranks) == ("hang/rank-died", [1])


def test_what_a_rank_went_on_from_is_no_end_of_it(tmp_path) -> None:
    """It raised in a collective, the program caught that, and was killed twenty steps later."""
    run = Called(tmp_path / "run")
    frames = [[TRAIN, 70, "probe"], [TRAIN, 90, "main"]]
    error = {"type": "RuntimeError", "message": "Connection closed by peer", "frames": frames}
    run.rank(1, "collective", frames, "ending", how="raising", raised=[error], step=run.step - 20)
    finding = main_finding(analyze([str(run.ended(1, signal=9, step=run.step).path)]))
    assert (finding.rule, finding.ranks) == ("hang/rank-died", [1])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0" * 2048,
        '{"open":1,"call":3',
        '{"open":1,"call":"x","step":[]}\n[1]\n',
        '{"call":1e999}\n',
        "{" * 9000,
    ],
)
def test_whatever_stands_there_the_death_is_told(tmp_path, text) -> None:
    run = Called(tmp_path / "run")
    (run.path / "ranks/00001/calls.jsonl").write_text(text)
    finding = main_finding(analyze([str(run.aborted(1, 50, (0,)).path)]))
    assert finding.rule == "hang/rank-died"
