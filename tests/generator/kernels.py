"""Names, shapes and relative durations of the kernels of a generated model: a plain convolutional network."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .machine import Machine


class Operator(NamedTuple):
    """An operator of the host and the kernel that it launches."""

    node: str
    """Autograd node, or "" in the forward and in the optimizer."""
    operator: str
    kernel: str


def _elementwise(functor: str) -> str:
    return f"void at::native::vectorized_elementwise_kernel<4, {functor}, at::detail::Array<char*, 2> >(int)"


FORWARD = (
    Operator("", "aten::cudnn_convolution", "sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nchw"),
    Operator(
        "", "aten::cudnn_batch_norm", "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true>()"
    ),
    Operator("", "aten::clamp_min_", _elementwise("at::native::clamp_min_scalar_kernel_impl")),
    Operator("", "aten::add_", _elementwise("at::native::CUDAFunctor_add<float>")),
)
BACKWARD = (
    Operator("ThresholdBackward0", "aten::threshold_backward", _elementwise("at::native::threshold_kernel")),
    Operator(
        "CudnnBatchNormBackward0",
        "aten::cudnn_batch_norm_backward",
        "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float, float)",
    ),
    Operator(
        "ConvolutionBackward0",
        "aten::convolution_backward",
        "sm90_xmma_dgrad_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc",
    ),
    Operator(
        "ConvolutionBackward0",
        "aten::convolution_backward",
        "sm90_xmma_wgrad_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc",
    ),
)
OPTIMIZER = (
    Operator(
        "", "aten::_foreach_add_", "void at::native::multi_tensor_apply_kernel<BinaryOpListAlphaFunctor>()"
    ),
)

EXTRA = (Operator("", "aten::mm", "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n"),)
"""Operators outside the phases."""

CPU_FORWARD = (Operator("", "aten::addmm", ""), Operator("", "aten::relu", ""))
CPU_BACKWARD = (
    Operator("ReluBackward0", "aten::threshold_backward", ""),
    Operator("AddmmBackward0", "aten::mm", ""),
    Operator("AddmmBackward0", "aten::mm", ""),
    Operator("torch::autograd::AccumulateGrad", "torch::distributed::reducer::mul_out", ""),
)
CPU_OPTIMIZER = (Operator("", "aten::add_", ""),)


def operators(phase: str, backend: str) -> tuple[Operator, ...]:
    """The operators of a phase, which are repeated cyclically."""
    if phase == "extra":
        return EXTRA
    if backend == "gloo":
        return {"forward": CPU_FORWARD, "backward": CPU_BACKWARD, "optimizer": CPU_OPTIMIZER}[phase]
    return {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER}[phase]


@lru_cache(maxsize=64)
def duration_shares(phase: str, count: int, seed: int) -> tuple[float, ...]:
    """Shares of the phase's duration of ``count`` kernels. They sum to 1 and are the same on all ranks."""
    if count == 0:
        return ()
    weights = np.random.default_rng([seed, len(phase), count]).lognormal(0.0, 0.5, count)
    return tuple((weights / weights.sum()).tolist())


@lru_cache(maxsize=64)
def shape_args(batch: int, phase: str) -> str:
    """ "Input Dims" in the profiler's format with record_shapes=True."""
    if phase == "optimizer":
        return ',"Input Dims":[[],[],[]],"Input type":["TensorList","TensorList","Scalar"]'
    dims = f"[[{batch},64,56,56],[64,64,3,3],[64]]"
    return f',"Input Dims":{dims},"Input type":["float","float","float"]'


class Launch(NamedTuple):
    """A kernel to launch. Calling it advances the host's clock."""

    machine: Machine
    operator: Operator
    duration_us: float
    launch_us: float
    shapes: str

    def __call__(self) -> None:
        """Run the operator on the host: its own work, then the launch call."""
        node, operator, kernel = self.operator
        machine, launch_us = self.machine, self.launch_us
        start_us = machine.now_us
        if not machine.recording:
            machine.work(0.5 * launch_us)
            machine.enqueue("kernel", kernel, "cudaLaunchKernel", 0.4 * launch_us, self.duration_us, 0)
            machine.work(0.1 * launch_us)
            return
        if node:
            with machine.span("cpu_op", f"autograd::engine::evaluate_function: {node}"):
                machine.work(0.15 * launch_us)
                with machine.span("cpu_op", node):
                    machine.work(0.1 * launch_us)
                    self._operate(operator, kernel, 0.25)
                machine.work(0.1 * launch_us)
        else:
            self._operate(operator, kernel, 0.5)
            machine.work(0.1 * launch_us)
        if machine.operator_part:
            machine.mark(machine.operator_part, start_us, machine.now_us)

    def _operate(self, operator: str, kernel: str, before: float) -> None:
        machine = self.machine
        with machine.span("cpu_op", operator, self.shapes) as external:
            machine.work(before * self.launch_us)
            call_us = 0.4 * self.launch_us
            machine.enqueue("kernel", kernel, "cudaLaunchKernel", call_us, self.duration_us, external)
