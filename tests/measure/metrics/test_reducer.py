"""What a reduction costs the computing thread, from a window beside a step log, and the price of a reduction too many."""

from __future__ import annotations

import json

import numpy as np
import pytest
from msgspec.structs import replace

from ddpdoctor.analysis import Options, load
from ddpdoctor.measure.attribution import attribute
from ddpdoctor.measure.costs import Context, ReducerCosts, price_all
from ddpdoctor.measure.graph import Sync
from ddpdoctor.measure.metrics import ddp_facts, reducer_work
from ddpdoctor.measure.metrics.job import SEARCH
from ddpdoctor.measure.taxonomy import SyncKind
from tests.measure.made import MS, NoLines, cycles_of, graph_of, work_array
from tests.measure.recorded import Job, record, run_ranks, write_beside
from tests.measure.traced import windows_of

BACKWARD_MS = 10.0
COPY_MS, ISSUE_MS = 0.5, 0.2


def write_trace(folder, rank, lines):
    """A window of steps 8 to 12: copies in each backward pass, one issue in its middle, one after its last gradient, and a
    metric's collective before it."""

    def work_of(event, start):
        if event["k"] == "bwd":
            begin = start + event["s"]
            yield "torch::distributed::reducer::mul_out", begin + 1 * MS, COPY_MS
            yield "torch::distributed::reducer::mul_out", begin + 8 * MS, COPY_MS
            yield "c10d::allreduce_", begin + 5 * MS, ISSUE_MS
            yield "c10d::allreduce_", begin + BACKWARD_MS * MS, ISSUE_MS
            yield "c10d::allreduce_", begin - 1 * MS, 0.7

    write_beside(folder, rank, lines, work_of)


def test_copies_and_issues_before_the_last_gradient_count(tmp_path):
    job = Job(world=2, steps=20, backward=BACKWARD_MS)
    logs = load([str(record(tmp_path / "run", job))], Options(cache=False)).logs
    traces = tmp_path / "traces"
    traces.mkdir()
    for rank, lines in enumerate(run_ranks(job)):
        write_trace(traces, rank, lines)
    windows = windows_of(traces)
    for work in reducer_work(logs, windows):
        assert work.whole_ns == pytest.approx((2 * COPY_MS + ISSUE_MS) * MS, rel=0.01)
        assert work.issue_ns == pytest.approx(ISSUE_MS * MS, rel=0.01)
    assert reducer_work(logs, []) == [None, None]
    assert reducer_work(logs[:1], windows[1:]) == [None]


def test_micro_batches_without_a_reduction_are_not_asked(tmp_path):
    logs = load([str(record(tmp_path / "run", Job(world=2, steps=20, ddp=False)))], Options(cache=False)).logs
    traces = tmp_path / "traces"
    traces.mkdir()
    for rank, lines in enumerate(run_ranks(Job(world=2, steps=20))):
        write_trace(traces, rank, lines)
    assert reducer_work(logs, windows_of(traces)) == [None, None]


def redundant_cost(job, synced_ns=()):
    context = Context(job, attribute(job), NoLines(), reducer=ReducerCosts(synced_ns=tuple(synced_ns)))
    return price_all(context).get("shared.redundant_sync")


@pytest.mark.parametrize("synced_ms", [0.0, 1.5])
def test_a_reduction_too_many_is_priced_with_its_copies(synced_ms):
    """Three micro-batches that all reduce; the job without the first two reductions is known."""
    world, syncs = (
        2,
        [Sync(SyncKind.GRADIENTS, "DDP gradients", (0, 1), micro=n, group="ddp0") for n in range(3)],
    )
    job = graph_of(cycles_of(syncs, work_array(20, 3, world, forward=4.0, backward=8.0 + synced_ms), 3.0))
    last = np.array([0.0, 0.0, synced_ms])[None, :, None]
    fixed = graph_of(
        cycles_of(
            syncs, work_array(20, 3, world, forward=4.0, backward=8.0 + last), np.array([[0.0, 0.0, 3.0]])
        )
    )
    own = [synced_ms * MS] * world
    saved_ms = (job.mean_cycle_ns - fixed.mean_cycle_ns) / MS
    assert saved_ms == pytest.approx(2 * (3.0 + synced_ms))
    cost = redundant_cost(job, own)
    assert cost.ms_per_step == pytest.approx(saved_ms)


def test_reductions_before_steps_of_two_optimizers_are_all_needed():
    """As in a GAN, whose discriminator and generator are trained one after the other in a step."""
    work = work_array(20, 2, 2, forward=4.0, backward=8.0)
    for update, redundant in ((0, True), (1, False)):
        micros = enumerate((0, update))
        syncs = [
            Sync(SyncKind.GRADIENTS, "allreduce", (0, 1), micro=n, group="0", update=after)
            for n, after in micros
        ]
        job = graph_of(cycles_of(syncs, work, 3.0))
        assert (redundant_cost(job) is not None) == redundant


def test_reductions_of_two_models_in_one_step_are_both_needed():
    """As an actor and a critic, whose gradients the same process group reduces: a trace names the group, not the model."""
    syncs = [Sync(SyncKind.GRADIENTS, "allreduce", (0, 1), micro=n, group="0") for n in range(2)]
    group = cycles_of(syncs, work_array(20, 2, 2, forward=4.0, backward=8.0), 3.0)
    same, other = (
        graph_of(replace(group, message_bytes=np.tile(sizes, (20, 1)))) for sizes in ([4e6, 4e6], [4e6, 9e6])
    )
    assert redundant_cost(same) is not None and redundant_cost(other) is None
    by_module = [replace(sync, group=f"ddp{n}") for n, sync in enumerate(syncs)]
    logs = graph_of(cycles_of(by_module, work_array(20, 2, 2, forward=4.0, backward=8.0), 3.0))
    context = Context(same, attribute(same), NoLines(), log_graph=logs)
    assert "shared.redundant_sync" not in price_all(context)


def test_no_more_is_saved_than_the_backward_pass_takes():
    syncs = [Sync(SyncKind.GRADIENTS, "DDP gradients", (0, 1), micro=n, group="ddp0") for n in range(2)]
    job = graph_of(cycles_of(syncs, work_array(20, 2, 2, forward=4.0, backward=1.0), 3.0))
    assert redundant_cost(job, [5.0 * MS] * 2).ms_per_step == pytest.approx(3.0 + 1.0)


def test_what_looking_for_unused_parameters_costs(tmp_path):
    """Two searches of 0.4 ms of walking and 0.3 ms of wrapping, each with a message of 0.5 ms. On a device the kernel of 50 us
    hides a part of one, unless the host sets the pace, and nothing waits for the message."""
    names = [SEARCH, "_DDPSink", "_DDPSinkBackward", "other"]
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": step * 1e4 + at * 1e3, "dur": us}
        for step in (1, 2)
        for at, (name, us) in enumerate(zip(names, [400, 200, 100, 6900], strict=True))
    ]
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1e4, "dur": 50}
    marks = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"ProfilerStep#{n}",
            "pid": 1,
            "tid": 1,
            "ts": n * 1e4,
            "dur": 1e4,
        }
        for n in (1, 2)
    ]
    launch = {
        **kernel,
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "pid": 1,
        "tid": 1,
        "ts": 9.99e3,
        "dur": 5,
    }
    launched = [{**event, "args": {"correlation": 3}} for event in (launch, kernel)]
    cases = (("cpu", []), ("device", [kernel]), ("host-bound", [*launched, *marks]))
    for folder, more in cases:
        (tmp_path / folder).mkdir()
        text = {"distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": events + more}
        (tmp_path / folder / "rank0.json").write_text(json.dumps(text))
    assert ddp_facts([], windows_of(tmp_path / "cpu"), 500.0, 1.0).search_ms == pytest.approx(1.2)
    assert ddp_facts([], windows_of(tmp_path / "cpu"), None, 4.0).search_ms == pytest.approx(2.8)
    assert ddp_facts([], windows_of(tmp_path / "device"), 500.0, 1.0).search_ms == pytest.approx(
        0.7 - 0.05 / 2
    )
    assert ddp_facts([], windows_of(tmp_path / "host-bound"), 500.0, 1.0).search_ms == pytest.approx(0.7)
    assert ddp_facts([], [], 500.0, 1.0).search_ms is None
