"""How much there was to compute in each step, by the shapes that a trace records.

Multiplications of matrices are nearly all of a model's computation, and weights nearly all of its elements: with twice the
tokens, the elements of all inputs grow by little, the multiplications double. So where a trace shows any, they are counted,
else elements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ddpdoctor.trace import RankTrace

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
"""What linear layers, and attention without a kernel of its own, come down to, forward and backward."""
_MOST_DIMENSIONS = 32
"""So many of them are still a number when they are multiplied; tensors have five."""
_ATTENTION = ("attention_forward", "attention_backward")
"""How the names of torch's own kernels of attention end."""


def amounts(trace: RankTrace, steps: Sequence[tuple[int, int, int]]) -> dict[int, float]:
    """Step → products and sums of matrix multiplications and attention, else elements of all operators' inputs; {} without
    shapes. Comparable between ranks of one job, not more."""
    rows = np.flatnonzero(trace.shapes >= 0)
    if not len(rows) or not steps:
        return {}
    pairs = trace.name[rows].astype(np.int64) * len(trace.names) + trace.shapes[rows]
    distinct, which = np.unique(pairs, return_inverse=True)
    texts = [
        (trace.names[pair // len(trace.names)], trace.names[pair % len(trace.names)])
        for pair in distinct.tolist()
    ]
    counted = np.array([_products(*text) for text in texts])
    if not counted.any():
        counted = np.array([_elements(shapes) for _, shapes in texts])
    at, amount = trace.start_ns[rows], counted[which]
    return {number: float(amount[(at >= start) & (at < end)].sum()) for number, start, end in steps}


@lru_cache(1 << 16)
def _products(name: str, shapes: str) -> float:
    """Multiply-adds of one operator; 0.0 where it is no such operator, or its shapes do not fit one. The ranks of a job share
    nearly all of these texts."""
    if name in _PRODUCTS:
        matrices = [dims for dims in _dimensions(shapes) if len(dims) in (2, 3)][-2:]
        if len(matrices) == 2 and matrices[0][-1] == matrices[1][-2]:
            return float(math.prod(matrices[0]) * matrices[1][-1])
    elif name.startswith("aten::_") and name.endswith(_ATTENTION):
        heads = [dims for dims in _dimensions(shapes) if len(dims) == 4]
        if heads:
            # Queries by keys by the heads' size, twice; which of the middle axes are tokens depends on the kernel.
            return 2.0 * math.prod(heads[0]) * max(heads[0][1:3])
    return 0.0


@lru_cache(1 << 16)
def _elements(shapes: str) -> float:
    """Elements of all tensors in an "Input Dims" text."""
    return float(sum(math.prod(dims) for dims in _dimensions(shapes)))


def _dimensions(text: str) -> list[list[int]]:
    """The tensors' dimensions in an "Input Dims" text; scalars and lists of tensors are passed over."""
    try:
        inputs = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [dims for dims in inputs if _is_tensor(dims)] if isinstance(inputs, list) else []


def _is_tensor(dims: Any) -> bool:
    """Whether these can be the dimensions of a tensor: their product must stay a number."""
    return (
        isinstance(dims, list)
        and 0 < len(dims) <= _MOST_DIMENSIONS
        and all(isinstance(d, int) and 0 <= d < 2**31 for d in dims)
    )
