"""Tables and columns of an export by their names; a version that lacks one has nothing to say about it."""

from __future__ import annotations

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
"""CUDA graphs that were recorded as wholes, which is how Nsight Systems does it unless it is told otherwise."""
COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
FILLS = "CUPTI_ACTIVITY_KIND_MEMSET"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
NVTX = "NVTX_EVENTS"
OS_CALLS = "OSRT_API"
NAMES = ("demangledName", "shortName", "mangledName")
"""Of a kernel, the one that Kineto writes first."""
OF_EXPORTS = frozenset((KERNELS, GRAPHS, COPIES, FILLS, RUNTIME, NVTX, OS_CALLS))
"""Any of them makes a file one of Nsight Systems."""
