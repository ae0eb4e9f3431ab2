"""The wait for data in profiler windows, also where a rank's device does not stand still for it (see :mod:`.loaderpace`)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.window import Window
from ddpdoctor.trace import classify

from .graph import READY_BATCH, CycleGroup
from .loaderpace import latent_data


class Tuning(msgspec.Struct, frozen=True):
    """From which batches the time that workers need is taken."""

    fewest_batches: int = 4
    """A window has some ten steps, of which the first are those of the reserve."""
    longest_ready_ns: int = 500_000
    """Taking a batch that stands ready takes tenths of a millisecond, which may be a larger part of a short step."""
    mostly: float = 0.5
    """Part of the batches for which the host must wait two times in a row: else most stood ready."""


TUNING = Tuning()


def latent_in_windows(group: CycleGroup, windows: Sequence[Window]) -> Array | None:
    """[N, R] :func:`latent_data` of jobs on a device; None where no worker sets the time.

    Their hosts run ahead of the device: they wait for each batch of a loader that is not quick enough, also where the device
    does not stand still for it.
    """
    times = [_batch_time_ns(window) for window in windows]
    if all(time is None for time in times):
        return None
    waits = np.nansum(group.wait - (0.0 if group.beside_wait is None else group.beside_wait), axis=1)
    return latent_data(group, times, [_batches_per_step(window) for window in windows], waits)


def _batches_per_step(window: Window) -> float:
    return int(classify.next_batches(window.trace).sum()) / max(len(window.steps), 1)


def _batch_time_ns(window: Window) -> float | None:
    """Time per batch of the workers of this rank, ns. None where there are no workers, or where most batches stood ready.

    The host waited for two batches in a row: none stood ready at the first, so the second was made between the ends of the
    two waits.
    """
    trace = window.trace
    rows = np.flatnonzero(classify.next_batches(trace))
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    if len(rows) < TUNING.fewest_batches or classify.IN_PROCESS in trace.name_of(int(rows[0])):
        return None
    ends = trace.end_ns[rows].astype(float)
    longest_ns = max(READY_BATCH * float(np.median(np.diff(ends))), TUNING.longest_ready_ns)
    waited = ends - trace.start_ns[rows] >= longest_ns
    in_a_row = waited[:-1] & waited[1:]
    if in_a_row.sum() < max(TUNING.fewest_batches - 1, TUNING.mostly * len(rows)):
        return None
    return float(np.diff(ends)[in_a_row].mean())
