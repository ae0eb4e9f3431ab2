"""A profiler slows hosts, not devices: what a GPU idles for its host is taken as it is in the run's other steps."""

from __future__ import annotations

import json

import pytest

from ddpdoctor.analysis import Options, load
from ddpdoctor.measure.align import windows_of
from ddpdoctor.measure.flow import measure
from tests.measure.recorded import EPOCH_NS, Job, record
from tests.measure.steplogs import log_of, span_of, steps_of, write_lines
from tests.measure.traced import reckoned
from tests.trace.trace_files import write

FIRST, LAST = 10, 14
KERNELS, KERNEL_MS = 10, 1.0
OPENING_MS = 25.0


def run_of(tmp_path, profiled_ms, kernel_ms=KERNEL_MS):
    """A job of one rank with steps of 18.5 ms, 10 of them kernels, and as much longer in its window; step 10 opens it."""

    def extra(rank, step):
        longer = profiled_ms * (FIRST <= step <= LAST)
        return {"before": OPENING_MS * (step == FIRST), "forward": longer}

    def marks(rank, step):
        return ["profiler_open"] * (step == FIRST) + ["profiled"] * (FIRST <= step <= LAST)

    job = Job(world=1, steps=60, transfer=0.0, extra=extra, marks=marks)
    run = record(tmp_path / "run", job)
    write_trace(run, [step for step in steps_of(run, 0) if FIRST <= step["step"] <= LAST], kernel_ms)
    return run


def write_trace(run, steps, kernel_ms):
    """Kernels at even distances, each launched by an operator that begins with the one before."""
    events = []

    def add(cat, name, at_us, dur, tid=1, **args):
        where = {"pid": 1, "tid": tid, "ts": at_us, "dur": dur, "args": args}
        events.append({"ph": "X", "cat": cat, "name": name, **where})

    opened_ns = steps[0]["t"][0] + OPENING_MS * 1e6
    add(
        "Trace",
        "PyTorch Profiler (0)",
        (opened_ns - EPOCH_NS) / 1e3,
        (steps[-1]["t"][1] - opened_ns) / 1e3,
        9,
    )
    number = 0
    for step in steps:
        start, end = ((at - EPOCH_NS) / 1e3 for at in step["t"])
        start += 1e3 * OPENING_MS * (step["step"] == FIRST)
        each = (end - start) / KERNELS
        for place in range(KERNELS):
            at, number = start + place * each, number + 1
            # Half of the time between kernels is an operator's, half is Python.
            add(
                "cpu_op",
                "aten::conv2d",
                at + 1e3 * kernel_ms,
                (each - 1e3 * kernel_ms) / 2,
                **{"External id": number},
            )
            add("cuda_runtime", "cudaLaunchKernel", at, 4.0, correlation=number)
            add("kernel", "void conv()", at + 5.0, 1e3 * kernel_ms, 7, correlation=number, device=0, stream=7)
    text = {"baseTimeNanoseconds": EPOCH_NS, "distributedInfo": {"rank": 0, "world_size": 1}}
    write(log_of(run, 0, "trace.json.gz"), {**text, "traceEvents": events})
    file = log_of(run, 0, "rank.json")
    window = {"steps": [FIRST, LAST + 1], "state": "saved", "why": None}
    file.write_text(json.dumps({**json.loads(file.read_text()), "device": "cuda:0", "window": window}))


def sampled(run, line):
    """Samples of the step log, all at this line of the user's script."""
    start_ns, end_ns = span_of(run, 0)
    where = {"where": 7, "file": "train.py", "line": line, "function": "prepare"}
    taken = [{"t": t, "s": [[0, 7, 7]]} for t in range(start_ns, end_ns, 700_000)]
    write_lines(log_of(run, 0, "samples.jsonl"), [where, *taken])
    return run


def measured(run):
    inputs = load([str(run)], Options(cache=False, jobs=1))
    windows = windows_of(inputs.traces, inputs.logs)
    return reckoned(measure(inputs.logs, windows, inputs.telemetry))


@pytest.mark.parametrize("profiled_ms", [0.0, 10.0, 40.0])
def test_the_price_of_an_idle_device_is_that_of_the_runs_steps(tmp_path, profiled_ms):
    """A step of 18.5 ms in which kernels run for 10 ms idles 8.5 ms for its host, however long it takes under the profiler."""
    found = measured(run_of(tmp_path, profiled_ms))
    shared, gpu = found.facts.shared, found.facts.gpu
    step_ms = found.facts.steps.mean_ms
    assert step_ms == pytest.approx(18.5)
    assert shared.launch.ms_per_step + shared.host.ms_per_step == pytest.approx(8.5, abs=0.15)
    assert shared.launch.share == pytest.approx(shared.launch.ms_per_step / step_ms, rel=0.02)
    assert gpu.busy_share == pytest.approx(10 / 18.5, rel=0.03)
    assert gpu.idle_share == pytest.approx(8.5 / 18.5, rel=0.03)
    assert found.facts.breakdown["compute"] == pytest.approx(10 / 18.5, rel=0.03)
    notes = [note for note in found.notes if "With the profiler open" in note]
    assert len(notes) == (profiled_ms > 0), found.notes
    assert not notes or f"a step took {18.5 + profiled_ms:.3g} ms instead of 18.5 ms" in notes[0]


def test_a_window_that_took_no_longer_than_the_run_is_taken_as_it_is(tmp_path):
    """The profiler does not make hosts faster: a shorter window is another part of the job."""
    found = measured(run_of(tmp_path, -4.0))
    shared = found.facts.shared
    assert shared.launch.ms_per_step + shared.host.ms_per_step == pytest.approx(4.5, abs=0.15)


def test_what_a_host_does_while_no_operator_runs_is_named_by_its_samples(tmp_path):
    """The trace has no stacks."""
    shared = measured(sampled(run_of(tmp_path, 10.0), 44)).facts.shared
    assert [where.line for where in shared.host.where] == [44]
    assert shared.launch.where == []


def test_a_window_with_more_work_than_the_profiler_explains_is_taken_as_it_is(tmp_path):
    """50 ms, of which the device computes 24: it idles for 26, and the step is 31.5 longer."""
    found = measured(run_of(tmp_path, 31.5, kernel_ms=2.4))
    shared = found.facts.shared
    assert shared.launch.ms_per_step + shared.host.ms_per_step == pytest.approx(26.0, abs=0.3)
    assert not any("With the profiler open" in note for note in found.notes)
