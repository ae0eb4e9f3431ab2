"""What a collective is for, by where it is issued."""

from __future__ import annotations

import json

import pytest

from ddpdoctor.measure.window import read_window
from ddpdoctor.trace import load_trace
from tests.measure.traced import windows_of
from tests.trace.trace_files import document, event, kernel, write

ENGINE = "autograd::engine::evaluate_function: "


def test_a_layers_own_reductions_are_the_models(tmp_path):
    """SyncBatchNorm reduces inside its backward; gradients are reduced where they are accumulated, or between functions."""
    events = []

    def add(name, at_us, us, category, thread, **args):
        where = {"pid": 0 if category == "kernel" else 1, "tid": thread, "ts": at_us, "dur": us}
        events.append({"ph": "X", "cat": category, "name": name, **where, "args": args})

    add("DistributedDataParallel.forward", 0, 100, "user_annotation", 1)
    add("Optimizer.step#SGD.step", 5000, 100, "user_annotation", 1)
    for number, function in enumerate(("SyncBatchNormBackward", "torch::autograd::AccumulateGrad", None)):
        at = 1000 + 1000 * number
        if function:
            add(ENGINE + function, at, 500, "cpu_op", 2)
        add("cudaLaunchKernel", at + 100, 10, "cuda_runtime", 2, correlation=number + 1)
        about = {
            "Collective name": "allreduce",
            "In msg nelems": 1024,
            "Out msg nelems": 1024,
            "dtype": "Float",
        }
        about |= {"Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
        kernel = {"correlation": number + 1, "stream": 20, "device": 0, **about}
        add("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + 200, 100, "kernel", 20, **kernel)
    text = {"distributedInfo": {"rank": 0, "world_size": 2, "backend": "nccl"}, "traceEvents": events}
    (tmp_path / "rank0.json").write_text(json.dumps(text))
    assert windows_of(tmp_path)[0].collectives.kind == ["model", "gradients", "gradients"]


def test_only_metadata_says_that_a_kernel_of_sends_is_no_all_to_all(tmp_path):
    sends = [kernel("ncclDevKernel_SendRecv(x)", 200.0), kernel("ncclDevKernel_SendRecv(x)", 300.0)]
    sends[0]["args"] |= {"Collective name": "send", "Src Rank": 0, "Dst Rank": 1, "dtype": "Float"}
    comms = read_window(load_trace(write(tmp_path / "rank0.json", document([event(), *sends])))).collectives
    assert comms.point_to_point.tolist() == [True, False]


def test_a_kernel_of_an_unknown_library_with_the_metadata_of_a_collective_is_one(tmp_path):
    kernels = [kernel("vendor::reduce_all(x)", 200.0), kernel("vendor::multiply(x)", 300.0)]
    kernels[0]["args"] |= {
        "Collective name": "allreduce",
        "In msg nelems": 8,
        "Out msg nelems": 8,
        "dtype": "Float",
    }
    window = read_window(load_trace(write(tmp_path / "rank0.json", document([event(), *kernels]))))
    assert window.collectives.operation == ["allreduce"] and window.compute[0].size == 1


def gloo_job(folder, *, lost_calls=(), lost_runs=(), bursts=6, delay_us=60):
    """Three calls 1 ms apart, each carried out by one of two threads in 4 ms, every 20 ms; numbered without end."""
    events, free = [], {10: 0, 11: 0}
    for number in range(3 * bursts):
        called = 20_000 * (number // 3) + 1_000 * (number % 3) + 1_000
        thread = min(free, key=free.get)
        begin = max(called + delay_us, free[thread])
        free[thread] = begin + 4_000
        for name, at, us, lane, lost in (
            ("c10d::allreduce_", called, 20, 1, lost_calls),
            ("gloo:all_reduce", begin, 4_000, thread, lost_runs),
        ):
            category = "cpu_op" if lane == 1 else "user_annotation"
            if number not in lost:
                events.append(
                    {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": lane, "ts": at, "dur": us}
                )
    text = {"distributedInfo": {"rank": 0, "world_size": 2, "backend": "gloo"}, "traceEvents": events}
    (folder / "rank0.json").write_text(json.dumps(text))
    comms = windows_of(folder)[0].collectives
    first = comms.start.min()
    return ((comms.start - first) / 1e6).round(2).tolist()


ALL_CALLED_MS = [20.0 * (number // 3) + number % 3 for number in range(18)]


@pytest.mark.parametrize("delay_us", [60, 900, 3_000])
def test_each_run_of_gloo_has_the_call_that_issued_it(delay_us, tmp_path):
    assert gloo_job(tmp_path, delay_us=delay_us) == ALL_CALLED_MS


@pytest.mark.parametrize("lost", [{4}, {5}, {3, 4, 5}, {4, 11}])
def test_a_run_that_is_lost_takes_its_call_with_it(lost, tmp_path):
    """The next one would else seem to have been issued a burst earlier, and so would all behind it."""
    found, whole = gloo_job(tmp_path, lost_runs=lost), [number not in lost for number in range(18)]
    expected = [ms for ms, here in zip(ALL_CALLED_MS, whole, strict=True) if here]
    bursts = {number // 3 for number in lost}
    apart = [
        (number // 3 in bursts, abs(ms - true))
        for number, ms, true in zip([n for n in range(18) if whole[n]], found, expected, strict=True)
    ]
    assert all(ms <= (1.0 if near else 0.0) for near, ms in apart)


@pytest.mark.parametrize("lost", [{10}, {11}, {9, 10, 11}])
def test_a_call_that_is_lost_leaves_the_others_theirs(lost, tmp_path):
    """A run without a call is taken to have been issued when it began."""
    found = gloo_job(tmp_path, lost_calls=lost)
    assert found[:9] == ALL_CALLED_MS[:9] and found[12:] == ALL_CALLED_MS[12:]
    assert all(abs(ms - true) < 4.0 for ms, true in zip(found[9:12], ALL_CALLED_MS[9:12], strict=True))
