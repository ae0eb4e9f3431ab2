"""Work between the phases of a step, on one rank of a real job: told as what it is, with the line of the gap."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor import analyze
from ddpdoctor.diagnose.diagnosis import Diagnosis
from tests.exam.real.draw import program
from tests.exam.real.kinds import PACED, Asked
from tests.exam.real.record import RUN, run

pytestmark = pytest.mark.slow
WORK = '''\
import time
import torch


def products(seconds):
    """Operators, as of a teacher."""
    until, matrix = time.perf_counter() + seconds, torch.ones(160, 160)
    with torch.no_grad():
        while time.perf_counter() < until:
            matrix = torch.tanh(matrix @ matrix)


def python(seconds):
    """Words and numbers, no operator."""
    until, total = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        for number in range(200):
            total += number * number % 7


def sleeping(seconds):
    time.sleep(seconds)
'''


def diagnosed(folder: Path, kind: str, ms: float, *options: str, everywhere: bool = False) -> Diagnosis:
    """Of a job of two ranks that does this after its optimizer, on rank 0 or everywhere."""
    work = f"{kind}({ms / 1e3})\n"
    places = {
        "after": work if everywhere else f"if rank == 0:\n    {work}",
        "imports": f"from work import {kind}\n",
    }
    drawn = program(1, folder / "job", Asked(shape={**PACED, "model": "mlp"}, places=places))
    (folder / "job" / "work.py").write_text(WORK)
    run(drawn, folder, options)
    return analyze(str(folder / RUN))


@pytest.mark.parametrize("ms", [12.0, 30.0])
@pytest.mark.parametrize("options", [(), ("--no-profile",)], ids=["window", "no window"])
def test_products_after_the_optimizer_are_no_slower_computation(options, ms, tmp_path):
    diagnosis = diagnosed(tmp_path, "products", ms, *options)
    found = [f for f in diagnosis.findings if f.rule.startswith("rank-imbalance/")]
    late = [f for f in found if f.severity != "info"]
    assert [(f.rule, f.ranks) for f in late] == [("rank-imbalance/host-work", [0])]
    where = late[0].where[0]
    assert "products" in {place.function for place in where.call_path}
    cost = diagnosis.facts["late"]["host"]
    assert cost["drawn_ms"] >= 0.7 * cost["late_ms"] and cost["drawn_as"] is None, cost
    assert blank_ms(diagnosis, 0) > blank_ms(diagnosis, 1) + 0.5 * ms, "the chart shows the gap"


def blank_ms(diagnosis, rank):
    """What the chart of the typical step leaves blank of a rank: neither a phase nor a collective."""
    spans = [span for span in diagnosis.timeline.spans if span.rank == rank]
    end_ms = max(span.start_ms + span.duration_ms for span in diagnosis.timeline.spans)
    return end_ms - sum(span.duration_ms for span in spans)


def test_sleeping_is_told_as_waiting_and_no_python_work(tmp_path):
    found = diagnosed(tmp_path, "sleeping", 30.0, "--no-profile").findings
    (late,) = [f for f in found if f.rule == "rank-imbalance/host-work"]
    assert late.ranks == [0] and "off-CPU" in late.explanation and "(`time.sleep`)" in late.explanation


def test_python_is_no_waiting(tmp_path):
    found = diagnosed(tmp_path, "python", 30.0, "--no-profile").findings
    (late,) = [f for f in found if f.rule == "rank-imbalance/host-work"]
    assert late.ranks == [0] and "sleep" not in late.explanation


@pytest.mark.parametrize(("kind", "waits"), [("sleeping", True), ("python", False)])
def test_what_all_ranks_do_is_told_as_waiting_or_as_work(kind, waits, tmp_path):
    rules = ("host/python-work", "host/outside-work")
    found = diagnosed(tmp_path, kind, 30.0, everywhere=True).findings
    (shared,) = [f for f in found if f.rule in rules]
    assert ("off-CPU" in shared.explanation) == waits
