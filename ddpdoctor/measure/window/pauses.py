"""Checkpoints and garbage collections in a profiler window of a rank with a device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import EMPTY, Intervals, subtract, union, union_of
from ddpdoctor.trace import RankTrace, classify

_SAVED_BYTES = 16 << 20
"""What a step copies out besides (a loss, metrics) is bytes to kilobytes; states go out as a whole, and are then written."""


def saving(trace: RankTrace, computes: NDArray[np.bool_], main: int, in_use: Intervals) -> Intervals:
    """When the rank saves its state and the device waits for it.

    ``computes`` are the kernels but for communication, ``main`` the training thread's lane, and ``in_use`` is when the device
    computes or communicates: a save that the device's queued work hides stops nothing.
    """
    return union_of(_bursts(trace, computes), subtract(_frames(trace, main, classify.is_save), in_use))


def collecting(trace: RankTrace, main: int) -> Intervals:
    """When Python's garbage collector ran on the training thread. Known in traces with stacks, where ``gc.collect`` was called,
    and of every collection where the profiler was asked for them (``record_python_gc_info``)."""
    return _frames(trace, main, classify.is_collection)


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
