"""The one classifier, on names that real traces and libraries use."""

import pytest

from ddpdoctor.trace import classify, find_traces, load_trace
from tests.trace.trace_files import SHARED, document, event, kernel, write

KERNELS = {
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": "allreduce",
    "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "broadcast",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)": "sendrecv",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)": "allreduce",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "allgather",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reducescatter",
    "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce",
    "ncclDevKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)": "sendrecv",
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)": None,
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": None,
    "ncclSymDevKernel_AllReduce_RSxLD_AGxST_sum_f32(ncclSymDevArgs)": "allreduce",
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)": "allreduce",
    "mscclKernel_Sum_half_Simple(ncclDevComm*, mscclAlgo*)": None,
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)": "alltoall",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)": "allreduce",
    "two_shot_all_reduce_kernel_inplace<float>(float**)": "allreduce",
    "hcom_allReduce__123_0_1": "allreduce",
}
COMPUTE = [
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(at::native::ReduceOp<float>)",
    "triton_poi_fused_all_reduce_wait_tensor_3",
    "ampere_sgemm_128x64_tn",
    "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 32, true, 1>(float, float)",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<int>(int*)",
    "Memcpy HtoD (Pinned -> Device)",
    "nccl:all_reduce",
    "gloo:all_reduce",
    "c10d::allreduce_",
    "record_param_comms",
]
ISSUES = {
    "nccl:all_reduce": "allreduce",
    "nccl:_all_gather_base": "allgather",
    "nccl:reduce_scatter_tensor_coalesced": "reducescatter",
    "nccl:send 0->1": "sendrecv",
    "gloo:barrier": "barrier",
    "gloo:all_reduce": "allreduce",
    "c10d::allreduce_": "allreduce",
    "c10d::_allgather_base_": "allgather",
    "c10d::alltoall_base_": "alltoall",
    "c10d::broadcast_": "broadcast",
    "c10d::send": "sendrecv",
    "c10d::recv_": "sendrecv",
    "c10d::barrier": "barrier",
    "_c10d_functional::all_to_all_single": "alltoall",
    "c10d::reduce_": "reduce",
    "c10d::gather_": "gather",
}
ARGUMENTS = {
    "allreduce": "allreduce", "_allgather_base": "allgather", "_reduce_scatter_base": "reducescatter",
    "all_to_allv": "alltoall", "broadcast": "broadcast", "barrier": "barrier",
    "send": "sendrecv", "recv": "sendrecv",
    "reduce": "reduce", "all_gather_into_tensor_coalesced": "allgather", "wait": None,
}  # fmt: skip
FUNCTIONS = {
    "all_reduce": "allreduce", "all_gather_into_tensor": "allgather", "all_gather_object": "allgather",
    "reduce_scatter": "reducescatter", "AllToAll": "alltoall", "monitored_barrier": "barrier",
    "batch_isend_irecv": "sendrecv", "DDP gradients": "allreduce", "DDP buffers": "broadcast", "unknown": None,
}  # fmt: skip
OTHER_HOST_NAMES = [
    "aten::gather",
    "aten::scatter_",
    "aten::broadcast_tensors",
    "aten::sum",
    "record_param_comms",
    "## all2all_data:lengths_wait ##",
    "c10d_functional::wait_tensor",
]


@pytest.mark.parametrize("name", KERNELS)
def test_communication_kernels(name):
    assert classify.is_communication_kernel(name)
    assert classify.communication_operation(name) == KERNELS[name]


@pytest.mark.parametrize("name", COMPUTE)
def test_other_names_are_no_communication_kernels(name):
    assert not classify.is_communication_kernel(name)


@pytest.mark.parametrize("name", ISSUES)
def test_host_events_that_issue_a_collective(name):
    assert classify.communication_operation(name) == ISSUES[name]
    assert classify.is_gloo(name) == name.startswith("gloo:")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_values_of_collective_name(name):
    assert classify.communication_operation(name) == ARGUMENTS[name]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_names_that_step_logs_use(name):
    assert classify.communication_operation(name) == FUNCTIONS[name]


@pytest.mark.parametrize("name", OTHER_HOST_NAMES)
def test_names_that_only_sound_like_communication(name):
    assert classify.communication_operation(name) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "HtoD"),
        ("Memcpy HtoD (Pinned -> Device)", "HtoD"),
        ("Memcpy HtoD (Host -> Device)", "HtoD"),
        ("Memcpy DtoH (Device -> Pinned)", "DtoH"),
        ("Memcpy DtoD (Device -> Device)", "DtoD"),
        ("Memcpy PtoP (Device -> Device)", "PtoP"),
        ("Memcpy M2D", "HtoD"),
        ("CopyHostToDevice", "HtoD"),
        ("Memset (Device)", None),
        ("cudaMemcpyAsync", None),
    ],
)
def test_copies(name, kind):
    assert classify.memcpy_kind(name) == kind


@pytest.mark.parametrize(
    ("name", "number"),
    [("ProfilerStep#12", 12), ("ProfilerStep*", None), ("step 7", 7), ("Iteration 3", 3),
     ("train_step#40", 40), ("## step 5 ##", 5), ("Optimizer.step#SGD.step", None),
     ("aten::step", None), ("step_fn", None)],
)  # fmt: skip
def test_steps(name, number):
    assert classify.step_number(name) == number


SYNC = [
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "hipDeviceSynchronize",
    "hipStreamSynchronize",
    "hipEventSynchronize",
    "aclrtSynchronizeStream",
    "zeEventHostSynchronize",
    "synchronizeStream",
]


def test_host_calls():
    for name in SYNC:
        assert classify.is_sync_call(name), name
    for name in (
        "cudaStreamWaitEvent",
        "cudaEventQuery",
        "cudaLaunchKernel",
        "cudaMemcpyAsync",
        "aten::synchronize_x",
    ):
        assert not classify.is_sync_call(name), name
    assert classify.is_dataloader("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
    assert classify.is_dataloader("torch/utils/data/dataloader.py(701): __next__")
    assert not classify.is_dataloader("## wait_for_batch ##")
    assert classify.is_optimizer_step("Optimizer.step#FusedAdam.step")
    assert not classify.is_optimizer_step("Optimizer.zero_grad#SGD.zero_grad")
    assert classify.is_ddp_forward("DistributedDataParallel.forward")
    assert classify.is_ddp_forward("torch/nn/parallel/distributed.py(1637): forward")


def test_events_of_a_trace(tmp_path):
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
    content = [
        event("nccl:all_reduce", 1, 9, "gpu_user_annotation", 0, 9),
        kernel(name, 2),
        kernel("gemm", 3),
        event(name, 4, cat="user_annotation"),
        event("Memset (Device)", 5, 1, "gpu_memset", 0, 7),
    ]
    trace = load_trace(write(tmp_path / "a.json", document(content)))
    assert classify.communication_kernels(trace).tolist() == [False, True, False, False, False]
    assert classify.device_work(trace).tolist() == [False, True, True, False, True]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize(
    ("folder", "kernels"),
    [("torchrec/sst_long_a2a_optimizer_2__run0", {33, 31}), ("tracelens/mi300_resnet_act_checkpoint", {17}),
     ("hta/nccl_parser_config", {21})],
)  # fmt: skip
def test_number_of_communication_kernels_in_public_traces(folder, kernels):
    counts = set()
    for file in find_traces([str(SHARED / folder)]).files:
        counts.add(int(classify.communication_kernels(load_trace(file)).sum()))
    assert counts == kernels
