"""Work between the phases of a step, on one rank of a real job: told as what it is, with the line of the gap."""

from __future__ import annotations

import pytest

from ddpdoctor import analyze
from tests.hook.recording import JOBS, TORCHRUN
from tests.launch.launched import run_under


@pytest.mark.slow
@pytest.mark.parametrize("ms", ["12", "30"])
@pytest.mark.parametrize("options", [(), ("--no-profile",)], ids=["window", "no window"])
def test_products_after_the_optimizer_are_no_slower_computation(options, ms, tmp_path):
    job = [*TORCHRUN, "2", str(JOBS / "gap_work.py"), "--place", "after-optimizer", "--ms", ms, "--on", "0"]
    recorded = run_under(tmp_path, job, *options)
    diagnosis = analyze(str(recorded.run))
    found = [f for f in diagnosis.findings if f.rule.startswith("rank-imbalance/")]
    late = [f for f in found if f.severity != "info"]
    assert [(f.rule, f.ranks) for f in late] == [("rank-imbalance/host-work", [0])]
    where = late[0].where[0]
    assert "products" in {place.function for place in where.way}
    cost = diagnosis.facts["late"]["host"]
    assert cost["drawn_ms"] >= 0.7 * cost["late_ms"] and cost["drawn_as"] is None, cost
    assert blank_ms(diagnosis, 0) > blank_ms(diagnosis, 1) + 0.5 * float(ms), "the chart shows the gap"


def blank_ms(diagnosis, rank):
    """What the chart of the typical step leaves blank of a rank: neither a phase nor a collective."""
    spans = [span for span in diagnosis.timeline.spans if span.rank == rank]
    end_ms = max(span.start_ms + span.duration_ms for span in diagnosis.timeline.spans)
    return end_ms - sum(span.duration_ms for span in spans)


@pytest.mark.slow
def test_sleeping_is_told_as_waiting_and_no_python_work(tmp_path):
    place = ("--place", "after-optimizer", "--kind", "sleeping", "--ms", "30", "--on", "0")
    recorded = run_under(tmp_path, [*TORCHRUN, "2", str(JOBS / "gap_work.py"), *place], "--no-profile")
    (late,) = [f for f in analyze(str(recorded.run)).findings if f.rule == "rank-imbalance/host-work"]
    assert late.ranks == [0] and "sleeps (`time.sleep`)" in late.explanation


@pytest.mark.slow
def test_python_is_no_waiting(tmp_path):
    place = ("--place", "after-optimizer", "--kind", "python", "--ms", "30", "--on", "0")
    recorded = run_under(tmp_path, [*TORCHRUN, "2", str(JOBS / "gap_work.py"), *place], "--no-profile")
    (late,) = [f for f in analyze(str(recorded.run)).findings if f.rule == "rank-imbalance/host-work"]
    assert late.ranks == [0] and "sleep" not in late.explanation


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "waits"), [("sleeping", True), ("python", False)])
def test_what_all_ranks_do_is_told_as_waiting_or_as_work(kind, waits, tmp_path):
    place = ("--place", "after-optimizer", "--kind", kind, "--ms", "30", "--on", "-1")
    recorded = run_under(tmp_path, [*TORCHRUN, "2", str(JOBS / "gap_work.py"), *place])
    rules = ("host/python-work", "host/outside-work")
    (shared,) = [f for f in analyze(str(recorded.run)).findings if f.rule in rules]
    assert ("hardly run" in shared.explanation) == waits
