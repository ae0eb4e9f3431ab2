"""The graph of step logs: what a recording may say that no job does."""

from __future__ import annotations

import json

import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.rundir.stepevents import EventField, EventKind, LineField
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


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_on_a_device_the_training_threads_time_on_a_cpu_says_nothing_of_host_work(tmp_path, device):
    """Another thread runs the backward there, and a loop in Python is no sleep because the training thread waited for that one."""
    run = record(tmp_path / "run", Job(world=2, steps=40, host=8.0))
    for rank in range(2):
        file = log_of(run, rank, "rank.json")
        file.write_text(json.dumps({**json.loads(file.read_text()), "device": device}))
    diagnosis = analyze(str(run), Options(cache=False, jobs=1))
    assert (diagnosis.facts["shared"]["host"]["awake_ms"] is None) == (device != "cpu")
    assert (diagnosis.facts["host"]["thread_cpu_ms"] is None) == (device != "cpu")
    said = [each.title for each in diagnosis.findings if each.rule == "host/python-work"]
    assert device == "cpu" or not any("off-CPU" in title for title in said)
