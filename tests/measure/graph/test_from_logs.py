"""The graph of step logs: what a recording may say that no job does."""

from __future__ import annotations

import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.rundir import EventField, EventKind, LineField
from tests.measure.recorded import Job, record
from tests.measure.steplogs import lines_of, log_of, write_lines


@pytest.mark.parametrize("operation", ["broadcast", "scatter"])
def test_a_root_that_takes_no_part_holds_nobody_up(tmp_path, operation):
    """Rank 1 alone recorded a broadcast from rank 0 in a group of its own."""
    run = record(tmp_path / "run", Job(world=3, steps=12))
    call = {
        EventField.KIND: EventKind.COLLECTIVE,
        EventField.START_NS: 500,
        EventField.DURATION_NS: 800,
        EventField.OPERATION: operation,
        EventField.GROUP: "alone",
        EventField.MESSAGE_BYTES: 400,
    }
    lines = lines_of(log_of(run, 1))
    for line in lines:
        if LineField.EVENTS in line:
            line[LineField.EVENTS].insert(0, call)
    write_lines(log_of(run, 1), lines)
    diagnosis = analyze(str(run), Options(cache=False, jobs=1))
    assert diagnosis.steps.measured >= 8 and diagnosis.facts["late"]["total"] is None
