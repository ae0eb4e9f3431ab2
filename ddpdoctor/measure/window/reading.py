"""Reduce a trace to a :class:`Window`, with the components of the rank's work outside its collectives and the amount of work in each step
by the recorded shapes. With a device, components are kernels, copies, and reasons for idle time; without one, operators of the training
thread.

The amount of work is the number of multiply-adds of matrix multiplications, else the number of input elements. Multiplications are nearly
all of a model's computation, and double with twice the tokens; most elements are weights, so their number grows by little.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import (
    EMPTY,
    Intervals,
    complement,
    intersect,
    subtract,
    union,
    union_of,
)
from ddpdoctor.measure.phases import Gap, Gaps, by_gap, gap_component, gaps_between
from ddpdoctor.measure.taxonomy import BETWEEN_PHASES, Component
from ddpdoctor.trace import RankTrace, classify

from .collectives import ENGINE, Collectives, collectives_of_gloo, collectives_of_kernels
from .idle import after_sync, device_gaps, host_syncs_and_idle
from .launches import CUDA_CALLS, DEVICE, event_union, host_recorded, launched_inside, launches
from .window import Window

Steps = Sequence[tuple[int, int, int]]


def read_window(trace: RankTrace, bounds: Steps | None = None, host: str = "") -> Window:
    """Reduce a trace to a window.

    ``bounds``: the steps, if they are known more precisely than from the trace's own marks; ``host``: the rank's host, if the trace does
    not state it.
    """
    on_device = bool(trace.category_mask("kernel").any())
    main = main_lane(trace)
    # From NCCL-like kernels if there are any, else from Gloo's annotations.
    kernels = np.flatnonzero(trace.category_mask("kernel") & classify.communication_kernels(trace))
    collectives = collectives_of_kernels(trace, kernels, main) if len(kernels) else collectives_of_gloo(trace)
    shows_host = not on_device or host_recorded(trace)
    # Kineto marks when profiling began. Opening the profiler takes milliseconds of the first step, which are no work of the job.
    marks = trace.category_mask("trace")
    began = int(trace.start_ns[marks].min()) if marks.any() else 0
    steps = (
        [(number, max(start, began), end) for number, start, end in bounds or () if end > began]
        or _steps(trace, main)
        or ([] if shows_host else _steps_on_device(trace))
    )
    span = _span(trace, on_device)
    work = (
        device_work(trace, main, collectives, span, steps[-1][2] if steps else None, shows_host=shows_host)
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
        updates=_update_starts(trace, forward),
        elements=work_amounts(trace, steps),
        **work,
    )


def _update_starts(trace: RankTrace, forward: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Starts of the optimizer's steps. LBFGS evaluates the loss several times per step, and needs the gradients of all ranks each time, so
    each ``forward`` pass counts too."""
    counted = classify.optimizer_steps(trace)
    if (trace.name_mask(lambda name: name.startswith("Optimizer.step#LBFGS")) & counted).any():
        counted = counted | forward
    return np.sort(trace.start_ns[counted])


def _span(trace: RankTrace, on_device: bool) -> tuple[int, int]:
    """First start and last end of the device's events, or for a CPU of operators and annotations; of all events if there are none."""
    if not trace.size:
        return 0, 0
    relevant = trace.category_mask(*(DEVICE if on_device else ("cpu_op", "user_annotation")))
    if not relevant.any():
        relevant = np.ones(trace.size, bool)
    return int(trace.start_ns[relevant].min()), int(trace.end_ns[relevant].max())


def main_lane(trace: RankTrace) -> int:
    """Return the training thread: the lane with the step marks, else with the optimizer's steps, else with most host events."""
    for predicate in (_is_step, classify.is_optimizer_step):
        rows = trace.name_mask(predicate) & trace.category_mask("user_annotation", "cpu_op")
        if rows.any():
            return int(np.bincount(trace.lane[rows]).argmax())
    rows = trace.category_mask("cpu_op", "user_annotation", "python_function")
    return int(np.bincount(trace.lane[rows]).argmax()) if rows.any() else -1


def _is_step(name: str) -> bool:
    return classify.step_number(name) is not None


def _steps(trace: RankTrace, main: int) -> list[tuple[int, int, int]]:
    """The steps that are marked on the training thread, else from the end of one optimizer step to the end of the next."""
    on_main = trace.lane == main
    marks = np.flatnonzero(
        trace.name_mask(_is_step) & trace.category_mask("user_annotation", "cpu_op") & on_main
    )
    if len(marks):
        numbers = [int(classify.step_number(trace.name_of(int(row))) or 0) for row in marks]
        steps = set(zip(numbers, trace.start_ns[marks].tolist(), trace.end_ns[marks].tolist(), strict=True))
        return sorted(steps, key=lambda step: step[1])
    ends = event_union(trace, trace.name_mask(classify.is_optimizer_step) & on_main)[1].tolist()
    return [(i, start, end) for i, (start, end) in enumerate(pairwise(ends))]


def _steps_on_device(trace: RankTrace) -> list[tuple[int, int, int]]:
    """The steps by the marks on the device's streams, each from its earliest begin to its latest end on any stream."""
    rows = np.flatnonzero(trace.name_mask(_is_step) & trace.category_mask("gpu_user_annotation"))
    if not len(rows):
        return []
    numbers = np.array([classify.step_number(trace.name_of(int(row))) or 0 for row in rows], np.int64)
    order = np.argsort(numbers, kind="stable")
    of_step, first = np.unique(numbers[order], return_index=True)
    ends = trace.end_ns
    steps = [
        (int(number), int(trace.start_ns[own].min()), int(ends[own].max()))
        for number, own in zip(of_step, np.split(rows[order], first[1:]), strict=True)
    ]
    return sorted(steps, key=lambda step: step[1])


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
"""Operators of linear layers and of attention without a kernel of its own, forward and backward."""
_MOST_DIMENSIONS = 32
"""Largest number of dimensions of a tensor, so that their product is a finite number. Usual tensors have at most five."""
_ATTENTION = ("attention_forward", "attention_backward")
"""Suffixes of the names of torch's own attention kernels."""


def work_amounts(trace: RankTrace, steps: Sequence[tuple[int, int, int]]) -> dict[int, float]:
    """Return step → multiply-adds of matrix multiplications and attention, else elements of all operators' inputs; {} without shapes. Only
    comparable between ranks of the same job."""
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
        counted = np.array([float(sum(map(math.prod, _dimensions(shapes)))) for _, shapes in texts])
    at, amount = trace.start_ns[rows], counted[which]
    return {number: float(amount[(at >= start) & (at < end)].sum()) for number, start, end in steps}


@lru_cache(1 << 16)
def _products(name: str, shapes: str) -> float:
    """Multiply-adds of one operator; 0.0 for other operators, or for shapes that do not fit. Cached because the ranks of a job have nearly
    all of these texts in common."""
    if name in _PRODUCTS:
        matrices = [dims for dims in _dimensions(shapes) if len(dims) in (2, 3)][-2:]
        if len(matrices) == 2 and matrices[0][-1] == matrices[1][-2]:
            return float(math.prod(matrices[0]) * matrices[1][-1])
    elif name.startswith("aten::_") and name.endswith(_ATTENTION):
        heads = [dims for dims in _dimensions(shapes) if len(dims) == 4]
        if heads:
            # Queries x keys x head size, twice. Which of the middle axes are tokens depends on the kernel.
            return 2.0 * math.prod(heads[0]) * max(heads[0][1:3])
    return 0.0


@lru_cache(1 << 16)
def _dimensions(text: str) -> list[list[int]]:
    """The tensors' dimensions in an "Input Dims" text, without scalars and lists of tensors."""
    try:
        inputs = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [
        dims
        for dims in (inputs if isinstance(inputs, list) else ())
        # Only plausible dimensions of a tensor, so that their product is finite.
        if isinstance(dims, list)
        and 0 < len(dims) <= _MOST_DIMENSIONS
        and all(isinstance(d, int) and 0 <= d < 2**31 for d in dims)
    ]


def device_work(
    trace: RankTrace,
    main: int,
    collectives: Collectives,
    span: tuple[int, int],
    last_step_end: int | None,
    *,
    shows_host: bool,
) -> dict[str, Any]:
    """Return what the device computed, copied and waited for, as fields of a :class:`Window`, on the trace's own clock. The sets only
    overlap with collectives. ``main`` is the training thread's lane, ``span`` that of the window. ``shows_host``: whether the host's work
    was recorded."""
    moving = trace.category_mask("gpu_memcpy")
    communicates = classify.communication_kernels(trace)
    # A copy within the device, such as from a bucket to its gradients, counts as computation.
    within = moving & trace.name_mask(lambda name: classify.memcpy_kind(name) == "DtoD")
    computes = (trace.category_mask("kernel", "gpu_memset") | within) & ~communicates
    gaps = device_gaps(trace, computes | (moving & ~communicates), collectives.end)
    # Recorded work; ``filled`` also contains unrecorded work.
    kernels, communicating = event_union(trace, computes), union(collectives.start, collectives.end)
    # Saving the rank's state costs nothing while queued work hides it.
    saving = subtract(_python_calls(trace, main, classify.is_save), union_of(kernels, communicating))
    saved = union_of(_large_copies(trace, computes), saving)
    copies = subtract(subtract(event_union(trace, moving & ~computes), kernels), saved)
    shown = union_of(kernels, copies, communicating)
    filled = union_of(kernels, subtract(subtract(gaps.by_device, saved), copies))
    # Reasons for idle time.
    idle = subtract(subtract(complement(shown, *span), saved), filled)
    collected = intersect(idle, garbage_collections(trace, main))
    uncollected = subtract(idle, collected)
    data = intersect(uncollected, event_union(trace, classify.next_batches(trace)))
    rest = subtract(uncollected, data)
    waiting = intersect(rest, after_sync(trace, uncollected))
    calls = event_union(trace, trace.category_mask(*CUDA_CALLS, "cpu_op"))
    issuing = intersect(subtract(rest, waiting), calls)
    late = subtract(rest, gaps.queued)
    # From the device's last event to the end of the last step, the device is idle because of the host.
    tail = EMPTY if last_step_end is None else union([span[1]], [last_step_end])
    busy = subtract(shown, saved)
    waits, idle_after = host_syncs_and_idle(trace, collectives, computes, busy, union_of(late, tail))
    optimizer = event_union(trace, computes & launched_inside(trace, optimizer_updates(trace)))
    host_gaps = gaps_on_host(trace, main)
    # When the device ran what the training thread launched in each kind of gap; by component without overlap, as streams are concurrent.
    rows = np.flatnonzero(computes) if host_gaps.kinds else np.empty(0, np.int64)
    launching = launches(trace, rows)
    known = (launching >= 0) & (trace.lane[launching] == main)
    rows, moments = rows[known], trace.start_ns[launching[known]]
    launched = by_gap(host_gaps, moments, trace.start_ns[rows], trace.end_ns[rows]) if len(rows) else {}
    between: dict[str, Intervals] = {}
    for component in BETWEEN_PHASES:
        own = [times for gap, times in launched.items() if gap_component(gap) is component]
        between[component] = subtract(union_of(EMPTY, *own), union_of(optimizer, *between.values()))
    return {
        "sets": {
            Component.DATA: data,
            Component.DEVICE_SYNC: waiting,
            Component.LAUNCH: issuing,
            Component.COPY: copies,
            Component.COLLECTION: collected,
            Component.CHECKPOINT: saved,
            Component.OPTIMIZER: optimizer,
            **between,
            Component.FORWARD: subtract(filled, union_of(optimizer, *between.values())),
        },
        "compute": kernels,
        # If nothing of the host was recorded, it may also have waited for the collective.
        "late_launches": intersect(gaps.for_host, communicating) if shows_host else EMPTY,
        "waits": waits,
        "idle_after": idle_after,
        "phase_gaps": {
            gap: union_of(launched.get(gap, EMPTY), intersect(late, host_gaps.of_kinds([gap])))
            for gap in host_gaps.kinds
        },
    }


def host_work(trace: RankTrace, main: int) -> dict[str, Any]:
    """Return the same for a CPU, from the training thread on lane ``main``. Overlapping time counts as data loader, else optimizer, else
    backward pass; other operators are loss or outside if they run between the phases, else forward pass."""
    on_main = trace.lane == main
    data = _annotated(trace, classify.is_dataloader, main)
    optimizer = subtract(optimizer_updates(trace, main), data)
    backward = subtract(_annotated(trace, lambda name: name.startswith(ENGINE), main), optimizer)
    operators = on_main & trace.category_mask("cpu_op") & ~trace.name_mask(lambda n: n.startswith("c10d::"))
    rest = union_of(event_union(trace, operators), _annotated(trace, classify.is_ddp_forward, main))
    computing = subtract(rest, union_of(data, optimizer, backward))
    gaps = gaps_on_host(trace, main)
    between = {component: intersect(computing, gaps.of(component)) for component in BETWEEN_PHASES}
    sets = {
        Component.DATA: data,
        Component.OPTIMIZER: optimizer,
        Component.BACKWARD: backward,
        Component.FORWARD: subtract(computing, union_of(*between.values())),
        **between,
    }
    phase_gaps = {gap: gaps.of_kinds([gap]) for gap in gaps.kinds}
    return {"sets": sets, "compute": union_of(optimizer, backward, computing), "phase_gaps": phase_gaps}


def optimizer_updates(trace: RankTrace, lane: int | None = None) -> Intervals:
    """Return the optimizer's steps, on one lane or on all, without a forward and backward pass in the optimizer's closure: each from the
    last end of such a pass. Lightning always passes a closure."""
    starts, ends = _annotated(trace, classify.is_optimizer_step, lane)
    pass_starts, pass_ends = _annotated(
        trace, lambda name: name.startswith(ENGINE) or classify.is_ddp_forward(name)
    )
    if not len(pass_starts):
        return starts, ends
    first, stop = np.searchsorted(pass_starts, starts), np.searchsorted(pass_starts, ends)
    return np.where(stop > first, np.minimum(pass_ends[stop - 1], ends), starts), ends


def _annotated(trace: RankTrace, predicate: Callable[[str], bool], lane: int | None = None) -> Intervals:
    """Union of the operators and annotations whose names match ``predicate``, on one lane or on all."""
    rows = trace.category_mask("cpu_op", "user_annotation") & trace.name_mask(predicate)
    return event_union(trace, rows if lane is None else rows & (trace.lane == lane))


_BEFORE_FORWARD = (Component.DATA, Component.OPTIMIZER)
_GAPS_WITH_PHASE: dict[Gap, tuple[Gap, ...]] = {
    **{(before, Component.BACKWARD): ((before, Component.FORWARD),) for before in _BEFORE_FORWARD},
    (Component.FORWARD, Component.OPTIMIZER): ((Component.FORWARD, Component.BACKWARD),),
    **{
        (Component.BACKWARD, after): (
            (Component.BACKWARD, Component.OPTIMIZER),
            (Component.OPTIMIZER, after),
        )
        for after in (Component.DATA, Component.FORWARD)
    },
}
"""Gap in which a phase is missing → the gaps that occur instead if the phase is marked."""
_OMITTED_RATIO = 0.5
"""Ratio of gaps without the phase to gaps with it, from which on the job omits the phase, such as the optimizer with accumulated
micro-batches. Below it, the profiler dropped the phase's events."""


def gaps_on_host(trace: RankTrace, main: int) -> Gaps:
    """Return the gaps between the phases of the training thread (lane ``main``) and the backward passes of the autograd engine's threads;
    none if the trace does not mark all phases."""
    found = gaps_between(
        {
            Component.DATA: _annotated(trace, classify.is_dataloader, main),
            Component.FORWARD: _annotated(trace, classify.is_ddp_forward, main),
            Component.BACKWARD: _annotated(trace, lambda name: name.startswith(ENGINE)),
            Component.OPTIMIZER: optimizer_updates(trace, main),
        }
    )
    within_phases = [place for place, gap in enumerate(found.kinds) if _is_within_phase(gap, found)]
    kept = ~np.isin(found.kind, within_phases)
    starts, ends = found.times
    return Gaps((starts[kept], ends[kept]), np.asarray(found.kind[kept]), found.kinds)


def _is_within_phase(gap: Gap, found: Gaps) -> bool:
    """Whether the gap is part of a phase: between two functions of the engine in a backward pass, or a phase that is missing in only a few
    steps because the profiler dropped its events."""
    if gap == (Component.BACKWARD, Component.BACKWARD):
        return True
    usual = _GAPS_WITH_PHASE.get(gap)
    if usual is None:
        return False
    counts = np.bincount(found.kind, minlength=len(found.kinds))
    known = [counts[place] for place, other in enumerate(found.kinds) if other in usual]
    return bool(counts[found.kinds.index(gap)] < _OMITTED_RATIO * max(known, default=0))


_SAVED_BYTES = 16 << 20
"""Least bytes of a save. States are copied as a whole before they are written; other copies to the host (a loss, metrics) are small."""


def garbage_collections(trace: RankTrace, main: int) -> Intervals:
    """Return when Python's garbage collector ran on the training thread. Traces with stacks have calls of ``gc.collect``; all collections
    are known if the profiler recorded them (``record_python_gc_info``)."""
    return _python_calls(trace, main, classify.is_garbage_collection)


def _python_calls(trace: RankTrace, main: int, predicate: Callable[[str], bool]) -> Intervals:
    rows = trace.category_mask("python_function")
    return (
        event_union(trace, rows & trace.name_mask(predicate) & (trace.lane == main)) if rows.any() else EMPTY
    )


def _large_copies(trace: RankTrace, computes: NDArray[np.bool_]) -> Intervals:
    """Copies to the host of at least ``_SAVED_BYTES`` in total between two kernels, each up to the next kernel."""
    out = np.flatnonzero(
        trace.category_mask("gpu_memcpy") & trace.name_mask(lambda n: classify.memcpy_kind(n) == "DtoH")
    )
    kernels = np.sort(trace.start_ns[computes])
    if not len(out) or not len(kernels):
        return EMPTY
    out = out[np.argsort(trace.start_ns[out], kind="stable")]
    places, first = np.unique(np.searchsorted(kernels, trace.start_ns[out]), return_index=True)
    sizes = np.add.reduceat(np.clip(trace.bytes[out], 0, None), first)
    over = np.maximum.reduceat(trace.end_ns[out], first)
    until = np.where(places < len(kernels), kernels[np.minimum(places, len(kernels) - 1)], over)
    saves = sizes >= _SAVED_BYTES
    return union(trace.start_ns[out[first]][saves], until[saves])
