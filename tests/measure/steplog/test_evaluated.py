"""Steps in which the models were in evaluation mode say nothing of training, whatever else was recorded of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.analysis import analyze
from tests.measure.steplogs import lines_of, log_of, write_lines

HEALTHY = Path(__file__).parents[3] / "fixtures" / "healthy"
LONG_NS = 25_000_000_000


def with_a_long_step(folder: Path, told: bool) -> Path:
    """The recorded run with one step more, of 25 s, of which rank 1 spends most on its own."""
    shutil.copytree(HEALTHY, folder)
    for trace in folder.rglob("trace.json.gz"):
        trace.unlink()
    for rank in (0, 1):
        path = log_of(folder, rank)
        lines = lines_of(path)
        last = max((line for line in lines if "step" in line), key=lambda line: line["step"])
        number, end_ns = last["step"] + 1, last["t"][1]
        lines += [{"evaluated": number}] * (told and rank == 1)
        events = [event | _later(event, rank) for event in last["ev"]]
        length_ns = LONG_NS + end_ns - last["t"][0]
        lines += [last | {"step": number, "t": [end_ns, end_ns + length_ns], "ev": events, "marks": []}]
        write_lines(path, lines)
        seen = [[k * LONG_NS // 100, 1, 1] for k in range(100)]
        with path.with_name("samples.jsonl").open("a") as samples:
            samples.write(json.dumps({"t": end_ns, "s": seen}) + "\n")
    return folder


def _later(event: dict[str, Any], rank: int) -> dict[str, Any]:
    """As rank 1 begins with 25 s of something else, for which rank 0 waits in its backward pass."""
    if rank == 0 and event["k"] == "bwd":
        return {"d": event["d"] + LONG_NS}
    late = rank == 1 or event["k"] == "opt"
    return {key: event[key] + LONG_NS for key in ("s", "base") if late and key in event}


@pytest.mark.parametrize("told", [True, False])
def test_it_is_set_aside_and_priced_nowhere(tmp_path, told: bool) -> None:
    diagnosis = analyze([str(with_a_long_step(tmp_path / "run", told))])
    assert (diagnosis.steps.set_aside.get("evaluation", 0) == 1) is told
    assert (diagnosis.steps.set_aside.get("single pause", 0) > 0) is not told
    assert diagnosis.steps.mean_ms is not None and diagnosis.steps.mean_ms < 100


@pytest.mark.parametrize("line", ['{"evaluated":-1}', '{"evaluated":"x"}', '{"evaluated":1e30}'])
def test_a_line_that_is_none_is_left_out_and_told(tmp_path, line: str) -> None:
    run = with_a_long_step(tmp_path / "run", told=False)
    with (run / "ranks/00001/steps.jsonl").open("a") as file:
        file.write(line + "\n")
    assert any("1 broken line" in note for note in analyze([str(run)]).notes)
