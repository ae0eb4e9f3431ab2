"""Which part of the time outside of forward, backward and optimizer is computation, by a window beside the step log."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from ddpdoctor.analysis import Options, load
from ddpdoctor.measure.flow import measure
from ddpdoctor.measure.graph import operator_shares, python_parts
from ddpdoctor.measure.places import Where
from ddpdoctor.rundir.stepevents import EventKind
from tests.measure.recorded import Job, plant, record, run_ranks, write_beside
from tests.measure.traced import found, windows_of

HOST_MS = 20.0
EVALUATION_MS = 200.0


def write_trace(folder, rank, lines, *, in_host, first_half=True):
    """A window of steps 8 to 12: operators fill each evaluation, and this share of the loop's own time, at its begin or end."""

    def work_of(event, start):
        end = start + event["s"] + event["d"]
        if event["k"] == "data" and event["l"] == 1:
            yield "aten::linear", end, EVALUATION_MS
        elif event["k"] == "data" and in_host:
            later = 0 if first_half else round((1 - in_host) * HOST_MS * 1e6)
            yield "aten::mul", end + later, in_host * HOST_MS

    write_beside(folder, rank, lines, work_of)


@pytest.mark.parametrize("in_host", (0.0, 0.5))
def test_evaluations_do_not_count(tmp_path, in_host):
    job = Job(world=2, steps=30, epoch=10, evaluation=EVALUATION_MS, evaluates_module=True, host=HOST_MS)
    logs = load([str(record(tmp_path / "run", job))], Options(cache=False)).logs
    traces = tmp_path / "traces"
    traces.mkdir()
    for rank, lines in enumerate(run_ranks(job)):
        write_trace(traces, rank, lines, in_host=in_host)
    shares = operator_shares(logs, windows_of(traces))
    assert set(shares) == {0, 1}
    assert all(share.overall == pytest.approx(in_host, abs=0.06) for share in shares.values())


def test_samples_inside_operators_are_not_python(tmp_path):
    """Operators fill the second half of each step's host time; line 1 is sampled in the first, line 2 in the second."""
    logs = load(
        [str(record(tmp_path / "run", Job(world=2, steps=30, host=HOST_MS)))], Options(cache=False)
    ).logs
    traces = tmp_path / "traces"
    traces.mkdir()
    for rank, lines in enumerate(run_ranks(Job(world=2, steps=30, host=HOST_MS))):
        write_trace(traces, rank, lines, in_host=0.5, first_half=False)
    samples = []
    for step in logs[0].steps:
        begin = next(step.end_of(event) for event in step.events if event.kind == EventKind.DATA)
        samples += [(begin + 5_000_000, 1, 1, 0), (begin + 15_000_000, 2, 2, 0)]
    lines = {line: Where("train.py", line, "main") for line in (1, 2, 3)}
    logs[0] = replace(logs[0], samples=np.array(samples), sample_where=lines)
    windows = windows_of(traces)
    shares = operator_shares(logs, windows)
    parts = python_parts(logs, windows, shares)
    of_first = [parts[0]["train.py", line] for line in (1, 2, 3)]
    assert of_first[0] == pytest.approx(1.0, abs=0.15) and of_first[1] == pytest.approx(0.0, abs=0.15)
    assert of_first[2] == pytest.approx(1.0 - shares[0].overall)
    assert parts[1] == {}
    assert python_parts(logs, [], shares) == [{}, {}]


@pytest.mark.parametrize("in_host", (0.0, 0.5, 1.0))
def test_operators_between_the_phases_of_one_rank_are_one_cause(tmp_path, in_host):
    """All Python, half of it, or none: a rank's work in a gap has one price, and does not make its phases slower."""
    job = Job(world=2, steps=30, extra=plant(1, host=HOST_MS))
    run, traces = record(tmp_path / "run", job), tmp_path / "traces"
    traces.mkdir()
    for rank, lines in enumerate(run_ranks(job)):
        write_trace(traces, rank, lines, in_host=in_host * rank)
    logs = load([str(run)], Options(cache=False)).logs
    late = measure(logs, windows_of(traces), {}).facts.late
    assert late.compute is None and late.host.ranks == [1]
    assert late.host.ms_per_step == pytest.approx(HOST_MS, rel=0.03)
    assert late.host.gap == "between loading the batch and the forward pass"


def test_operators_between_the_phases_of_all_ranks(tmp_path):
    job = Job(world=2, steps=30, host=HOST_MS)
    run, traces = record(tmp_path / "run", job), tmp_path / "traces"
    traces.mkdir()
    for rank, lines in enumerate(run_ranks(job)):
        write_trace(traces, rank, lines, in_host=0.75)
    logs = load([str(run)], Options(cache=False)).logs
    facts = measure(logs, windows_of(traces), {}).facts
    assert found(facts.late) == {}
    assert facts.shared.outside.ms_per_step == pytest.approx(HOST_MS, rel=0.03)
    assert facts.shared.host.ms_per_step == pytest.approx(HOST_MS / 4, rel=0.2)
    assert facts.shared.outside.gap == "between loading the batch and the forward pass"
