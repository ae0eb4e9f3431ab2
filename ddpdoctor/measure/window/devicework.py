"""Components of a rank with a device: kernels, copies, and why the device stood idle."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

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
from ddpdoctor.measure.phases import Gap, Gaps, by_gap, gap_component
from ddpdoctor.measure.taxonomy import IN_GAPS, Component
from ddpdoctor.trace import RankTrace, classify

from .collectives import Collectives
from .gaps import DeviceGaps, after_sync, device_gaps
from .hostphases import gaps_on_host
from .hostwaits import DeviceTimeline, waits_and_idle
from .launches import CUDA_CALLS, host_recorded, launched_inside, launches, rows_of
from .pauses import collecting, saving
from .work import Work


class _Busy(msgspec.Struct, frozen=True):
    """What the device was busy with; the sets do not overlap, but for collectives."""

    computes: Mask
    """[events] kernels, fills and copies within the device, communication apart."""
    kernels: Intervals
    """Union of the events that compute."""
    filled: Intervals
    """The same, with the time in which the device was busy with what the trace lacks."""
    copies: Intervals
    """Copies between host and device, beside computation apart."""
    saved: Intervals
    """In which the device waited for a checkpoint."""
    collectives: Intervals
    shown: Intervals
    """Computing, copying or communicating, as the trace shows it."""


class _Idle(msgspec.Struct, frozen=True):
    """Why the device stood idle."""

    data: Intervals
    collected: Intervals
    waiting: Intervals
    """The host let the device run dry."""
    issuing: Intervals
    late: Intervals
    """The host had not launched, for whatever reason but waits for data and garbage collection."""


def device_work(
    trace: RankTrace, main: int, collectives: Collectives, span: tuple[int, int], last_step_end: int | None
) -> Work:
    """What the device computed, copied and waited for. ``main`` is the training thread's lane, ``span`` the window's."""
    moving = trace.category_mask("gpu_memcpy")
    computes = _computes(trace, moving)
    gaps = device_gaps(trace, computes | (moving & ~_communicates(trace)), collectives.end)
    busy = _busy(trace, main, collectives, gaps, computes)
    idle = _idle(trace, main, busy, gaps, span)
    # From the device's last event to the end of the last step: what the host works there comes before its next launch.
    tail = EMPTY if last_step_end is None else union([span[1]], [last_step_end])
    timeline = DeviceTimeline(subtract(busy.shown, busy.saved), union_of(idle.late, tail), computes)
    waits, idle_after = waits_and_idle(trace, collectives, timeline)
    optimizer = rows_of(trace, computes & launched_inside(trace, classify.optimizer_steps(trace)))
    host_gaps = gaps_on_host(trace, main)
    launched = _launched_in(trace, main, host_gaps, computes)
    between = _between(launched, optimizer)
    sets: dict[str, Intervals] = {
        Component.DATA: idle.data,
        Component.DEVICE_SYNC: idle.waiting,
        Component.LAUNCH: idle.issuing,
        Component.COPY: busy.copies,
        Component.COLLECTION: idle.collected,
        Component.CHECKPOINT: busy.saved,
        Component.OPTIMIZER: optimizer,
        **between,
        Component.FORWARD: subtract(busy.filled, union_of(optimizer, *between.values())),
    }
    # A host of which nothing is known may have waited for the collective, too.
    late_launches = intersect(gaps.for_host, busy.collectives) if host_recorded(trace) else EMPTY
    in_gaps = {
        gap: union_of(launched.get(gap, EMPTY), intersect(idle.late, host_gaps.among([gap])))
        for gap in host_gaps.kinds
    }
    return Work(sets, busy.kernels, late_launches, waits, idle_after, in_gaps)


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
    """The same by kind of work, each apart from what is ``taken`` and from the others: streams run beside each other."""
    sets: dict[str, Intervals] = {}
    for component in IN_GAPS:
        own = [times for gap, times in launched.items() if gap_component(gap) is component]
        sets[component] = subtract(union_of(EMPTY, *own), union_of(taken, *sets.values()))
    return sets


def _communicates(trace: RankTrace) -> Mask:
    return trace.name_mask(classify.is_communication_kernel)


def _computes(trace: RankTrace, moving: Mask) -> Mask:
    """[events] A copy within the device, as of a bucket into its gradients, is work like any other."""
    inside = moving & trace.name_mask(lambda n: classify.memcpy_kind(n) == "DtoD")
    return (trace.category_mask("kernel", "gpu_memset") | inside) & ~_communicates(trace)


def _busy(trace: RankTrace, main: int, collectives: Collectives, gaps: DeviceGaps, computes: Mask) -> _Busy:
    kernels = rows_of(trace, computes)
    communicating = union(collectives.start, collectives.end)
    saved = saving(trace, computes, main, in_use=union_of(kernels, communicating))
    moved = rows_of(trace, trace.category_mask("gpu_memcpy") & ~computes)
    copies = subtract(subtract(moved, kernels), saved)
    unrecorded = subtract(subtract(gaps.by_device, saved), copies)
    return _Busy(
        computes=computes,
        kernels=kernels,
        filled=union_of(kernels, unrecorded),
        copies=copies,
        saved=saved,
        collectives=communicating,
        shown=union_of(kernels, copies, communicating),
    )


def _idle(trace: RankTrace, main: int, busy: _Busy, gaps: DeviceGaps, span: tuple[int, int]) -> _Idle:
    idle = subtract(subtract(complement(busy.shown, *span), busy.saved), busy.filled)
    collected = intersect(idle, collecting(trace, main))
    uncollected = subtract(idle, collected)
    data = intersect(uncollected, rows_of(trace, classify.next_batches(trace)))
    rest = subtract(uncollected, data)
    waiting = intersect(rest, after_sync(trace, uncollected))
    calls = rows_of(trace, trace.category_mask(*CUDA_CALLS, "cpu_op"))
    issuing = intersect(subtract(rest, waiting), calls)
    return _Idle(data, collected, waiting, issuing, late=subtract(rest, gaps.queued))
