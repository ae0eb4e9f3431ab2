"""Traces in the same format that no PyTorch profiler wrote: a browser's, a compiler's, our own timeline."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ddpdoctor.trace.classify import DEVICE

_KEYS = frozenset(
    {"deviceProperties", "distributedInfo", "baseTimeNanoseconds", "pytorch_version", "torch_version"}
)
"""Top-level keys that only Kineto writes."""
_CATEGORY = re.compile(
    r"(?:^|[_ ])(?:cpu_op|op|kernel|runtime|driver|user_annotation|python_function|cpu_instant_event|memcpy|memset"
    r"|ac2g|fwdbwd|async_npu)s?$"
)
"""Ends of the categories of all vendors: cuda_runtime, xpu_driver, npu_kernel, hpu_op ..."""
_NAME = re.compile(
    r"aten::|c10d|autograd::|torch|ProfilerStep|(?:nccl|rccl|gloo|xccl|hccl|mpi|ucc):|ncclKernel|ncclDevKernel"
    r"|Optimizer\.|DistributedDataParallel|enumerate\(DataLoader\)|(?:cuda|hip)(?:Launch|Memcpy|Stream|Event|Device)"
)
_OWN = "ddpdoctor"


def is_own_timeline(top: Mapping[str, Any]) -> bool:
    """Whether these top-level keys are those that ``ddpdoctor export`` writes."""
    other = top.get("otherData")
    return isinstance(other, dict) and other.get("producer") == _OWN


def is_foreign(top: Mapping[str, Any], categories: Collection[str], names: Iterable[str]) -> bool:
    """Whether nothing in a trace is PyTorch's: neither keys, nor categories (normalised), nor names."""
    if not _KEYS.isdisjoint(top) or not DEVICE.isdisjoint(categories):
        return False
    return not any(map(_CATEGORY.search, categories)) and not any(map(_NAME.match, names))
