"""Components of a rank's work outside its collectives, from a trace: with a device, kernels, copies, and reasons for idle time; without
one, the training thread's operators. Also gaps between the phases, checkpoints and garbage collections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import (
    EMPTY,
    Intervals,
    Mask,
    complement,
    intersect,
    subtract,
    union,
    union_of,
)
from ddpdoctor.measure.phases import Gap, Gaps, by_gap, gap_component, gaps_between
from ddpdoctor.measure.taxonomy import BETWEEN_PHASES, Component
from ddpdoctor.trace import RankTrace, classify

from .collectives import ENGINE, Collectives
from .idle import DeviceTimeline, after_sync, device_gaps, host_syncs_and_idle
from .launches import CUDA_CALLS, event_union, host_recorded, launched_inside, launches


def device_work(
    trace: RankTrace, main: int, collectives: Collectives, span: tuple[int, int], last_step_end: int | None
) -> dict[str, Any]:
    """What the device computed, copied and waited for, as fields of a :class:`Window`, on the trace's own clock; the sets overlap with
    collectives only. ``main`` is the training thread's lane, ``span`` the window's."""
    moving = trace.category_mask("gpu_memcpy")
    computes = _computes(trace, moving)
    gaps = device_gaps(trace, computes | (moving & ~_communicates(trace)), collectives.end)
    # Work that the trace shows, and work that it lacks.
    kernels, communicating = event_union(trace, computes), union(collectives.start, collectives.end)
    saved = checkpoint_saves(trace, computes, main, in_use=union_of(kernels, communicating))
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
    # From the device's last event to the end of the last step: the host's work there comes before its next launch.
    tail = EMPTY if last_step_end is None else union([span[1]], [last_step_end])
    timeline = DeviceTimeline(subtract(shown, saved), union_of(late, tail), computes)
    waits, idle_after = host_syncs_and_idle(trace, collectives, timeline)
    optimizer = event_union(trace, computes & launched_inside(trace, classify.optimizer_steps(trace)))
    host_gaps = gaps_on_host(trace, main)
    launched = _launched_in(trace, main, host_gaps, computes)
    between = _between(launched, optimizer)
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
        # A host of which nothing was recorded may also have waited for the collective.
        "late_launches": intersect(gaps.for_host, communicating) if host_recorded(trace) else EMPTY,
        "waits": waits,
        "idle_after": idle_after,
        "phase_gaps": {
            gap: union_of(launched.get(gap, EMPTY), intersect(late, host_gaps.among([gap])))
            for gap in host_gaps.kinds
        },
    }


def _launched_in(trace: RankTrace, main: int, gaps: Gaps, computes: Mask) -> Mapping[Gap, Intervals]:
    """When the device ran what the training thread launched in each kind of gap."""
    rows = np.flatnonzero(computes)
    if not len(gaps.kinds) or not len(rows):
        return {}
    calls = launches(trace, rows)
    known = (calls >= 0) & (trace.lane[calls] == main)
    rows, moments = rows[known], trace.start_ns[calls[known]]
    return by_gap(gaps, moments, trace.start_ns[rows], trace.end_ns[rows])


def _between(launched: Mapping[Gap, Intervals], taken: Intervals) -> dict[str, Intervals]:
    """``launched`` by component, without ``taken`` and without overlap: streams run concurrently."""
    sets: dict[str, Intervals] = {}
    for component in BETWEEN_PHASES:
        own = [times for gap, times in launched.items() if gap_component(gap) is component]
        sets[component] = subtract(union_of(EMPTY, *own), union_of(taken, *sets.values()))
    return sets


def _communicates(trace: RankTrace) -> Mask:
    return trace.name_mask(classify.is_communication_kernel)


def _computes(trace: RankTrace, moving: Mask) -> Mask:
    """[events] whether each event computes. A copy within the device, such as of a bucket into its gradients, counts as computation."""
    inside = moving & trace.name_mask(lambda n: classify.memcpy_kind(n) == "DtoD")
    return (trace.category_mask("kernel", "gpu_memset") | inside) & ~_communicates(trace)


def host_work(trace: RankTrace, main: int) -> dict[str, Any]:
    """The same for a CPU, from the training thread on lane ``main``: time of the data loader and the optimizer first, then of the
    backward pass, then what runs between the phases; any other operator is the forward pass's."""
    on_main = trace.lane == main
    annotated = on_main & trace.category_mask("cpu_op", "user_annotation")

    def named(predicate: Callable[[str], bool]) -> Intervals:
        return event_union(trace, annotated & trace.name_mask(predicate))

    data = named(classify.is_dataloader)
    optimizer = subtract(named(classify.is_optimizer_step), data)
    backward = subtract(named(lambda n: n.startswith(ENGINE)), optimizer)
    operators = on_main & trace.category_mask("cpu_op") & ~trace.name_mask(lambda n: n.startswith("c10d::"))
    rest = union_of(event_union(trace, operators), named(classify.is_ddp_forward))
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
    phase_gaps = {gap: gaps.among([gap]) for gap in gaps.kinds}
    return {"sets": sets, "compute": union_of(optimizer, backward, computing), "phase_gaps": phase_gaps}


_BEFORE_FORWARD = (Component.DATA, Component.OPTIMIZER)
_USUAL_INSTEAD: dict[Gap, tuple[Gap, ...]] = {
    **{(before, Component.BACKWARD): ((before, Component.FORWARD),) for before in _BEFORE_FORWARD},
    (Component.FORWARD, Component.OPTIMIZER): ((Component.FORWARD, Component.BACKWARD),),
    **{
        (Component.BACKWARD, behind): (
            (Component.BACKWARD, Component.OPTIMIZER),
            (Component.OPTIMIZER, behind),
        )
        for behind in (Component.DATA, Component.FORWARD)
    },
}
"""A gap in which a phase is missing → the gaps that there are where the phase is marked."""
_SELDOM = 0.5
"""Ratio to the usual gaps from which on a job omits the phase, such as the optimizer with accumulated micro-batches."""


def gaps_on_host(trace: RankTrace, main: int) -> Gaps:
    """The gaps between the phases of the training thread, on lane ``main``, and the backward passes of its engine's threads; none where
    the trace does not mark all phases."""
    on_main = trace.lane == main
    annotated = trace.category_mask("cpu_op", "user_annotation")
    engine = annotated & trace.name_mask(lambda n: n.startswith(ENGINE))
    found = gaps_between(
        {
            Component.DATA: event_union(trace, on_main & annotated & trace.name_mask(classify.is_dataloader)),
            Component.FORWARD: event_union(
                trace, on_main & annotated & trace.name_mask(classify.is_ddp_forward)
            ),
            Component.BACKWARD: event_union(trace, engine),
            Component.OPTIMIZER: event_union(
                trace, on_main & annotated & trace.name_mask(classify.is_optimizer_step)
            ),
        }
    )
    left_out = [place for place, gap in enumerate(found.kinds) if _is_within_phase(gap, found)]
    kept = ~np.isin(found.kind, left_out)
    starts, ends = found.times
    return Gaps((starts[kept], ends[kept]), np.asarray(found.kind[kept]), found.kinds)


def _is_within_phase(gap: Gap, found: Gaps) -> bool:
    """Whether the gap lies within a phase: a backward pass continues between two functions of its engine, and a phase missing in only a
    few steps was there, since profilers drop events."""
    if gap == (Component.BACKWARD, Component.BACKWARD):
        return True
    usual = _USUAL_INSTEAD.get(gap)
    if usual is None:
        return False
    counts = np.bincount(found.kind, minlength=len(found.kinds))
    known = [counts[place] for place, other in enumerate(found.kinds) if other in usual]
    return bool(counts[found.kinds.index(gap)] < _SELDOM * max(known, default=0))


_SAVED_BYTES = 16 << 20
"""Least bytes of a save: other copies to the host (a loss, metrics) are bytes to kilobytes; states are copied as a whole, and then
written."""


def checkpoint_saves(
    trace: RankTrace, computes: NDArray[np.bool_], main: int, in_use: Intervals
) -> Intervals:
    """When the rank saves its state and the device waits for it.

    ``computes`` are the kernels except for communication, ``main`` is the training thread's lane, and ``in_use`` is when the device
    computes or communicates: a save that the device's queued work hides stops nothing.
    """
    return union_of(_bursts(trace, computes), subtract(_frames(trace, main, classify.is_save), in_use))


def garbage_collections(trace: RankTrace, main: int) -> Intervals:
    """When Python's garbage collector ran on the training thread. Known in traces with stacks, where ``gc.collect`` was called, and for
    every collection where the profiler recorded them (``record_python_gc_info``)."""
    return _frames(trace, main, classify.is_garbage_collection)


def _frames(trace: RankTrace, main: int, predicate: Callable[[str], bool]) -> Intervals:
    rows = trace.category_mask("python_function")
    if not rows.any():
        return EMPTY
    rows &= trace.name_mask(predicate) & (trace.lane == main)
    return union(trace.start_ns[rows], trace.end_ns[rows])


def _bursts(trace: RankTrace, computes: NDArray[np.bool_]) -> Intervals:
    """Copies to the host of at least ``_SAVED_BYTES`` between two kernels, up to the next kernel."""
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
