"""Reduce a trace to a :class:`Window`, with the amount of work in each step by the recorded shapes.

Multiplications of matrices are nearly all of a model's computation, and weights nearly all of its elements: with twice the tokens, the
elements of all inputs grow by little, the multiplications double. So multiplications are counted where a trace shows any, else
elements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.trace import RankTrace, classify

from .collectives import Collectives, collectives_of_gloo, collectives_of_kernels
from .components import device_work, host_work
from .launches import DEVICE, host_recorded
from .window import Window

Steps = Sequence[tuple[int, int, int]]


def read_window(trace: RankTrace, bounds: Steps | None = None, host: str = "") -> Window:
    """Reduce a trace.

    ``bounds``: the steps, where they are known better than by the trace's own marks; ``host``: the rank's host where the trace does not
    state it.
    """
    on_device = bool(trace.category_mask("kernel").any())
    main = main_lane(trace)
    collectives = _collectives(trace, main)
    shows_host = not on_device or host_recorded(trace)
    steps = (
        _recorded(bounds or [], trace)
        or _steps(trace, main)
        or ([] if shows_host else _steps_on_device(trace))
    )
    span = _span(trace, on_device)
    work = (
        device_work(trace, main, collectives, span, last_step_end=steps[-1][2] if steps else None)
        if on_device
        else host_work(trace, main)
    )
    forward = trace.name_mask(classify.is_ddp_forward) & trace.category_mask("user_annotation", "cpu_op")
    return Window(
        trace=trace,
        rank=trace.meta.rank or 0,
        host=trace.meta.host or host,
        on_device=on_device,
        steps=steps,
        span=span,
        collectives=collectives,
        shows_host=shows_host,
        forwards=np.sort(trace.start_ns[forward]),
        updates=np.sort(trace.start_ns[classify.optimizer_steps(trace)]),
        elements=work_amounts(trace, steps),
        **work,
    )


def _recorded(bounds: Steps, trace: RankTrace) -> Steps:
    """The steps, from where the profiler began, which Kineto marks: opening it takes milliseconds of the first step, and is no work of
    the job."""
    marks = trace.category_mask("trace")
    began = int(trace.start_ns[marks].min()) if marks.any() else 0
    return [(number, max(start, began), end) for number, start, end in bounds if end > began]


def _collectives(trace: RankTrace, main: int) -> Collectives:
    """NCCL-like kernels where there are any, else Gloo's annotations."""
    kernels = np.flatnonzero(
        trace.category_mask("kernel") & trace.name_mask(classify.is_communication_kernel)
    )
    return collectives_of_kernels(trace, kernels, main) if len(kernels) else collectives_of_gloo(trace)


def _span(trace: RankTrace, on_device: bool) -> tuple[int, int]:
    """First start and last end of the device's events, or of what a CPU computes; of all events where there are none."""
    if not trace.size:
        return 0, 0
    relevant = trace.category_mask(*(DEVICE if on_device else ("cpu_op", "user_annotation")))
    if not relevant.any():
        relevant = np.ones(trace.size, bool)
    return int(trace.start_ns[relevant].min()), int(trace.end_ns[relevant].max())


def main_lane(trace: RankTrace) -> int:
    """The training thread: the lane with the step marks, else with the optimizer's steps, else with most host
    events."""
    for predicate in (_is_step, classify.is_optimizer_step):
        rows = trace.name_mask(predicate) & trace.category_mask("user_annotation", "cpu_op")
        if rows.any():
            return int(np.bincount(trace.lane[rows]).argmax())
    rows = trace.category_mask("cpu_op", "user_annotation", "python_function")
    return int(np.bincount(trace.lane[rows]).argmax()) if rows.any() else -1


def _is_step(name: str) -> bool:
    return classify.step_number(name) is not None


def _steps(trace: RankTrace, main: int) -> list[tuple[int, int, int]]:
    """The steps that are marked on the training thread, else from the end of one optimizer's step to the next one's."""
    on_main = trace.lane == main
    marks = np.flatnonzero(
        trace.name_mask(_is_step) & trace.category_mask("user_annotation", "cpu_op") & on_main
    )
    if len(marks):
        steps = {
            (
                int(classify.step_number(trace.name_of(int(row))) or 0),
                int(trace.start_ns[row]),
                int(trace.end_ns[row]),
            )
            for row in marks
        }
        return sorted(steps, key=lambda step: step[1])
    rows = np.flatnonzero(trace.name_mask(classify.is_optimizer_step) & on_main)
    ends = sorted(_outermost_ends(trace, rows))
    return [(i, start, end) for i, (start, end) in enumerate(pairwise(ends))]


def _steps_on_device(trace: RankTrace) -> list[tuple[int, int, int]]:
    """The steps by the marks on the device's streams: from the first stream's begin to the last stream's end."""
    rows = np.flatnonzero(trace.name_mask(_is_step) & trace.category_mask("gpu_user_annotation"))
    if not len(rows):
        return []
    numbers = np.array([classify.step_number(trace.name_of(int(row))) or 0 for row in rows], np.int64)
    order = np.argsort(numbers, kind="stable")
    of_step, first = np.unique(numbers[order], return_index=True)
    steps = [
        (int(number), int(trace.start_ns[own].min()), int(trace.end_ns[own].max()))
        for number, own in zip(of_step, np.split(rows[order], first[1:]), strict=True)
    ]
    return sorted(steps, key=lambda step: step[1])


def _outermost_ends(trace: RankTrace, rows: NDArray[np.int64]) -> set[int]:
    ends: set[int] = set()
    reach = -1
    for row in rows[np.argsort(trace.start_ns[rows], kind="stable")]:
        if trace.start_ns[row] >= reach:
            reach = int(trace.end_ns[row])
            ends.add(reach)
    return ends


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
"""Operators of linear layers, and of attention without its own kernel, forward and backward."""
_MOST_DIMENSIONS = 32
"""Largest number of dimensions whose product is a finite number; tensors have five."""
_ATTENTION = ("attention_forward", "attention_backward")
"""Suffixes of the names of torch's own attention kernels."""


def work_amounts(trace: RankTrace, steps: Sequence[tuple[int, int, int]]) -> dict[int, float]:
    """Step → multiply-adds of matrix multiplications and attention, else elements of all operators' inputs; {} without shapes. Only
    comparable between ranks of one job."""
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
    """Multiply-adds of one operator; 0.0 for other operators, or shapes that do not fit one. The ranks of a job share nearly all of
    these texts."""
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
    """The tensors' dimensions in an "Input Dims" text, without scalars and lists of tensors."""
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
