"""Kineto's event categories under their newest names; and what the old ones did not tell apart."""

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
