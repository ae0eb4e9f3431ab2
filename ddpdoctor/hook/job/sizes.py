"""The size of what a loader gave and a model gets, asked of shapes alone: nothing is copied, and no device is waited for."""

from __future__ import annotations

from typing import Any, Optional

_DEEPEST_BATCH = 4
"""Containers in containers that are looked into for a tensor: a dictionary of lists of pairs is one less."""


def batch_size(batch: Any) -> Optional[int]:
    """The first dimension of the first tensor in a batch; of a plain list of things, its length. None where there is neither."""
    for _ in range(_DEEPEST_BATCH):
        shape = getattr(batch, "shape", None)
        if shape is not None:
            return int(shape[0]) if len(shape) else None
        if hasattr(batch, "values") and hasattr(batch, "keys"):
            values = batch.values() if callable(batch.values) else ()
            batch = next(iter(values), None)
        elif isinstance(batch, (list, tuple)) and batch:
            if isinstance(batch[0], (int, float, str, bytes)):
                return len(batch)
            batch = batch[0]
        else:
            return None
    return None


def input_elements(values: Any, nested: int = 2) -> int:
    """Elements of all tensors among the arguments, and in the lists and dictionaries among them."""
    total = 0
    for value in values:
        if hasattr(value, "numel"):
            total += int(value.numel())
        elif nested and type(value) in (list, tuple):
            total += input_elements(value, nested - 1)
        elif nested and hasattr(value, "values") and hasattr(value, "keys") and callable(value.values):
            total += input_elements(value.values(), nested - 1)
    return total
