"""What one rank's device did in its window: kernels, copies, idle time."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import covered, total, union
from ddpdoctor.measure.window import Window, launched_inside, rows_of
from ddpdoctor.trace import classify

from .marked import communicating

_MATMUL = (
    "gemm",
    "gemv",
    "conv",
    "cutlass",
    "cudnn",
    "implicit",
    "wgrad",
    "dgrad",
    "xmma",
    "nvjet",
    "fmha",
    "flash",
    "Cijk_",
)
"""Parts of the names of kernels that multiply matrices: cuBLAS's (gemm, xmma, nvjet), cuDNN's, CUTLASS's, FlashAttention's,
and rocBLAS's (Cijk_)."""
_TENSOR = (
    "tensorop",
    "xmma",
    "hmma",
    "884",
    "1688",
    "16816",
    "s161616",
    "wgmma",
    "nvjet",
    "fmha",
    "flash",
    "_bf16",
    "_f16",
    "tf32",
    "mma",
    "h884",
    "i8816",
    "bf16",
)
"""Parts of the names of those among them that use tensor cores: their instructions (mma, wgmma), the shapes of these
(16816 is m16n8k16), and types that only tensor cores multiply."""


class DeviceNumbers(msgspec.Struct, frozen=True):
    """One rank's numbers for the facts of the same names."""

    busy_share: float
    idle_share: float
    kernels_per_step: float
    optimizer_kernels_share: float | None
    median_kernel_us: float | None
    tensor_core_share: float | None
    matmul_share: float | None
    pageable_copy_ms: float | None
    copy_bytes_per_step: float | None


def device_numbers(window: Window) -> DeviceNumbers:
    """The device of a window that has one. Kernels of collectives are no computation."""
    trace, steps = window.trace, max(len(window.steps), 1)
    span_ns = max(window.span[1] - window.span[0], 1)
    compute = trace.category_mask("kernel") & ~trace.name_mask(classify.is_communication_kernel)
    count, times_ns = float(compute.sum()), trace.duration_ns[compute]
    stepping = classify.optimizer_steps(trace)
    matmul_share, tensor_core_share = _matmul_shares(window, compute)
    pageable_copy_ms, copy_bytes_per_step = _copies(window, steps)
    return DeviceNumbers(
        busy_share=total(window.compute) / span_ns,
        idle_share=_idle_share(window, span_ns),
        kernels_per_step=count / steps,
        optimizer_kernels_share=float((compute & launched_inside(trace, stepping)).sum()) / max(count, 1.0)
        if stepping.any()
        else None,
        median_kernel_us=float(np.median(times_ns)) / 1e3 if len(times_ns) else None,
        tensor_core_share=tensor_core_share,
        matmul_share=matmul_share,
        pageable_copy_ms=pageable_copy_ms,
        copy_bytes_per_step=copy_bytes_per_step,
    )


def _idle_share(window: Window, span_ns: int) -> float:
    """Share of the window in which the device neither computes nor is in a collective."""
    collectives = communicating(window)
    busy = union(
        np.concatenate((window.compute[0], collectives[0])),
        np.concatenate((window.compute[1], collectives[1])),
    )
    return 1.0 - min(1.0, float(covered(busy, window.span[0], window.span[1])) / span_ns)


def _matmul_shares(window: Window, compute: NDArray[np.bool_]) -> tuple[float | None, float | None]:
    """Of the time of computation kernels that multiply matrices, and of their time on tensor cores."""
    trace = window.trace
    matmul = compute & trace.name_mask(lambda name: any(part in name for part in _MATMUL))
    tensor = matmul & trace.name_mask(lambda name: any(part in name.lower() for part in _TENSOR))
    compute_ns, matmul_ns = (float(trace.duration_ns[rows].sum()) for rows in (compute, matmul))
    return (
        matmul_ns / compute_ns if compute_ns else None,
        float(trace.duration_ns[tensor].sum()) / matmul_ns if matmul_ns else None,
    )


def _copies(window: Window, steps: int) -> tuple[float | None, float | None]:
    """Time per step in copies from pageable memory, ms, and bytes that are copied to the device per step; None where nothing
    is copied to it."""
    trace = window.trace
    to_device = trace.category_mask("gpu_memcpy") & trace.name_mask(
        lambda name: classify.memcpy_kind(name) == "HtoD"
    )
    if not to_device.any():
        return None, None
    pageable = to_device & trace.name_mask(lambda name: "pageable" in name.lower())
    moved = trace.bytes[to_device]
    return total(rows_of(trace, pageable)) / steps / 1e6, float(moved[moved > 0].sum()) / steps
