"""Devices as facts, from what ran on them."""

from __future__ import annotations

import json

import pytest

from ddpdoctor.measure.metrics import gpu_facts
from tests.measure.traced import windows_of


@pytest.mark.parametrize("name", ["Memcpy HtoD (Pageable -> Device)", "Memcpy M2D (Pageable -> Device)"])
def test_copies_are_found_by_any_name(name, tmp_path):
    """XPU calls the host's memory M."""
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1.0, "dur": 5.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": name, "pid": 0, "tid": 7, "ts": 9.0, "dur": 2000.0},
    ]
    events[1]["args"] = {"bytes": 4096}
    text = {"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}
    (tmp_path / "rank0.json").write_text(json.dumps(text))
    facts = gpu_facts(windows_of(tmp_path), [], {})
    assert (facts.copy_bytes_per_step, facts.pageable_copy_ms) == (4096.0, pytest.approx(2.0))


def test_batch_norm_and_layouts_of_cudnn_multiply_no_matrices(tmp_path):
    """Names as in public traces, with times in µs."""
    kernels = {
        "volta_scudnn_128x64_relu_interior_nn_v1": 40.0,
        "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float, float)": 30.0,
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(cudnn::ops)": 10.0,
        "void cudnn::ops::nhwcToNchwKernel<float, float, float, true, false>(cudnn::ops)": 5.0,
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": 15.0,
    }
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 100.0 * i, "dur": duration}
        for i, (name, duration) in enumerate(kernels.items())
    ]
    text = {"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}
    (tmp_path / "rank0.json").write_text(json.dumps(text))
    facts = gpu_facts(windows_of(tmp_path), [], {})
    assert (facts.matmul_share, facts.layout_share) == (pytest.approx(0.4), pytest.approx(0.15))
    assert facts.tensor_core_share == 0.0
