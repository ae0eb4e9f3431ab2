"""Devices as facts, from what ran on them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from ddpdoctor.measure.metrics import gpu_facts, loader_facts
from tests.measure.traced import windows_of


def facts_of_kernels(folder, kernels):
    """Facts of a device that runs these kernels: name and µs."""
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 100.0 * i, "dur": duration}
        for i, (name, duration) in enumerate(kernels.items())
    ]
    text = {"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}
    (folder / "rank0.json").write_text(json.dumps(text))
    return gpu_facts(windows_of(folder), [], {})


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
    facts = facts_of_kernels(tmp_path, kernels)
    assert (facts.matmul_share, facts.layout_share) == (pytest.approx(0.4), pytest.approx(0.15))
    assert facts.tensor_core_share == 0.0


@pytest.mark.parametrize(
    ("name", "share"),
    [
        # As on an H200: of a product in 32 bits, and of one in bfloat16.
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize256x128x8_stage3_warpsize4x2x1_ffma_aligna4", 0.0),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(Params)", 0.0),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", 1.0),
        ("sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nchw", 1.0),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", 1.0),
        ("sm90_xmma_gemm_e4m3e4m3_bf16f32_f32_tn_n_tilesize128x128x128", 1.0),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", 1.0),
    ],
)
def test_a_kernel_runs_on_tensor_cores_by_its_types(tmp_path, name, share):
    """xmma is a library; its name contains mma, the name of the instruction."""
    assert facts_of_kernels(tmp_path, {name: 10.0}).tensor_core_share == share


def test_what_a_closure_of_the_optimizer_launches_is_not_of_the_optimizer(tmp_path):
    """As in Lightning: the optimizer's step calls the forward and backward pass, of which each launches two kernels, and updates then."""
    host = {"ph": "X", "pid": 9}
    engine = "autograd::engine::evaluate_function: MmBackward0"
    events = []
    for step in range(3):
        at, number = 1000.0 * step, 100 * step + 1
        events += [
            {
                **host,
                "tid": 9,
                "cat": "user_annotation",
                "name": f"ProfilerStep#{step}",
                "ts": at,
                "dur": 1000.0,
            },
            {
                **host,
                "tid": 9,
                "cat": "user_annotation",
                "name": "Optimizer.step#AdamW.step",
                "ts": at + 100,
                "dur": 700.0,
            },
            {
                **host,
                "tid": 9,
                "cat": "user_annotation",
                "name": "DistributedDataParallel.forward",
                "ts": at + 110,
                "dur": 200.0,
            },
            {**host, "tid": 8, "cat": "cpu_op", "name": engine, "ts": at + 400, "dur": 200.0},
            *(launched("gemm", at + when, number + n) for n, when in enumerate((120, 220, 420, 520))),
            launched("multi_tensor_apply_kernel", at + 700, number + 9),
        ]
    events = [part for event in events for part in (event if isinstance(event, list) else [event])]
    text = {"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}
    (tmp_path / "rank0.json").write_text(json.dumps(text))
    windows = windows_of(tmp_path)
    assert gpu_facts(windows, [], {}).optimizer_kernels_share == pytest.approx(1 / 5)
    optimizer = windows[0].sets["optimizer"]
    assert (optimizer[1] - optimizer[0]).sum() == 3 * 20_000


def test_matrix_cores_of_amd_are_tensor_cores(tmp_path):
    """Tensile's names say the types (S: single precision, B: bfloat16, H: half) and the matrix instruction (MI). Times in µs."""
    kernels = {
        "Cijk_Alik_Bljk_BBS_BH_Bias_MT128x128x32_MI16x16x1_SN_1LDSB0": 50.0,
        "Cijk_Ailk_Bljk_HHS_BH_MT64x64x64_MI32x32x8x1_SE": 30.0,
        "Cijk_Ailk_Bljk_SB_MT64x64x16_MI32x32x2x1_SE": 15.0,
        "Cijk_Ailk_Bljk_HB_MT32x32x16_SE_APM1": 5.0,
    }
    facts = facts_of_kernels(tmp_path, kernels)
    assert (facts.matmul_share, facts.tensor_core_share) == (pytest.approx(1.0), pytest.approx(0.8))


def launched(name, at_us, correlation, category="kernel", *, on_device_us=None, **args):
    """A call on the host, and what it launches on the device, later by default."""
    begin = at_us + 500.0 if on_device_us is None else on_device_us
    args = {"device": 0, "stream": 7, "correlation": correlation, **args}
    return [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9, "ts": at_us, "dur": 5.0,
         "args": {"correlation": correlation}},
        {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": begin, "dur": 20.0, "args": args},
    ]  # fmt: skip


def unmarked_steps(count):
    """Steps of 1 ms: a batch, its copy, three kernels and the optimizer's; the device runs half a step behind."""
    events = []
    for step in range(count):
        at, number = 1000.0 * step, 100 * step + 1
        host = {"ph": "X", "pid": 9, "tid": 9}
        loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        events += [
            {**host, "cat": "user_annotation", "name": loader, "ts": at, "dur": 60.0},
            *launched("Memcpy HtoD (Pinned -> Device)", at + 80, number, "gpu_memcpy", bytes=4096),
            *(launched("gemm", at + 100 * (1 + n), number + 1 + n) for n in range(3)),
            {
                **host,
                "cat": "user_annotation",
                "name": "Optimizer.step#SGD.step",
                "ts": at + 700,
                "dur": 200.0,
            },
            *launched("multi_tensor_apply_kernel", at + 800, number + 10),
        ]
    return [part for event in events for part in (event if isinstance(event, list) else [event])]


@pytest.mark.parametrize("lost", [(), (102, 203, 311)])
def test_what_is_counted_per_step_is_launched_in_the_steps(tmp_path, lost):
    """Without marks, five optimizers enclose four steps; the profiler lost the launches with the numbers ``lost``."""
    events = [
        event
        for event in unmarked_steps(5)
        if event["cat"] != "cuda_runtime" or event["args"]["correlation"] not in lost
    ]
    text = {"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}
    (tmp_path / "rank0.json").write_text(json.dumps(text))
    windows = windows_of(tmp_path)
    facts = gpu_facts(windows, [], {})
    assert len(windows[0].steps) == 4
    assert (facts.kernels_per_step, facts.copy_bytes_per_step) == (4.0, 4096.0)
    assert facts.optimizer_kernels_share == (3 if lost else 4) / 16
    assert loader_facts([], windows, {}).wait_ms == pytest.approx(0.06)


OWN, OTHER = "6b20ea96-c588-c0a4-8bd1-721c6a8b4a90", "11111111-c588-c0a4-8bd1-721c6a8b4a90"
H200 = {"device": "cuda:0", "device_name": "NVIDIA H200", "device_uuid": OWN, "cuda": "13.0"}


@pytest.mark.parametrize(
    ("of_rank_1", "on_device", "shared"),
    [
        ({}, 0, [0, 1]),
        ({"device_uuid": OTHER}, 0, []),
        # As current devices are without set_device, while the model is on cuda:LOCAL_RANK.
        ({}, 1, None),
        ({"device": "cuda:1"}, 1, [0, 1]),
        ({"device_uuid": None}, 0, None),
        ({"device_name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb"}, 0, None),
        ({"device_name": "AMD Instinct MI300X", "cuda": None}, 0, None),
    ],
)
def test_ranks_share_a_gpu_if_their_kernels_run_on_the_one_of_their_records(
    tmp_path, of_rank_1, on_device, shared
):
    for rank, device in enumerate((0, on_device)):
        events = launched("gemm", 100.0, 1)
        events[1]["args"]["device"] = device
        text = {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(text))
    logs = [
        SimpleNamespace(rank=rank, host=f"container {rank}", record=SimpleNamespace(info={**H200, **own}))
        for rank, own in enumerate(({}, of_rank_1))
    ]
    windows = windows_of(tmp_path)
    assert gpu_facts(windows, logs, {}).shared_ranks == shared
    assert gpu_facts([], logs, {}).shared_ranks is None and gpu_facts(windows, [], {}).shared_ranks is None
