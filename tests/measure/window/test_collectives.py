"""What a collective is for, by where it is issued."""

from __future__ import annotations

import json

from tests.measure.traced import windows_of

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
