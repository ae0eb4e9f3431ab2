"""Kineto's event categories: the newest names, and what they say about an event."""

from __future__ import annotations

import re

_RENAMED = {
    # torch 1.8 to 1.11 (libkineto's ActivityType names before they were lower-cased)
    "operator": "cpu_op",
    "cpu op": "cpu_op",
    "runtime": "cuda_runtime",
    "cuda runtime": "cuda_runtime",
    "concurrent_kernel": "kernel",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "gpu user annotation": "gpu_user_annotation",
    "user annotation": "user_annotation",
    "python function": "python_function",
    "pythonfunction": "python_function",
}

DEVICE_WORK = frozenset(
    {
        "kernel",
        "gpu_memcpy",
        "gpu_memset",
        "mtia_ccp_events",
        "mtia_kernel",
        "glow_runtime_device",
        "hpu_op",
        "npu_kernel",
        "collective_comm",
    }
)
"""Work that an accelerator did."""

DEVICE = DEVICE_WORK | {"gpu_user_annotation", "cuda_sync", "mtia_workloadd", "mtia_insight"}
"""Everything that stands on a device's lane."""

_OLD_ANNOTATION = re.compile(
    r"ProfilerStep\b|enumerate\(DataLoader\)|Optimizer\.|DistributedDataParallel\.|nccl:|gloo:|## "
)


def normalised(category: object) -> str:
    """The newest name of a category; unknown ones lower-cased, a missing one ""."""
    text = category.lower().strip() if isinstance(category, str) else ""
    return _RENAMED.get(text, text)


def is_old_operator(category: object) -> bool:
    """Whether this is the old schema's one category for operators and annotations alike."""
    return isinstance(category, str) and category.lower() in ("operator", "cpu op")


def is_annotation_name(name: str) -> bool:
    """Whether the old schema's operator of this name is what is now a user_annotation."""
    return _OLD_ANNOTATION.match(name) is not None
