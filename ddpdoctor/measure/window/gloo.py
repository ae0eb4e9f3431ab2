"""Collectives on CPUs: Gloo's annotations, paired with the calls that issued them."""

from __future__ import annotations

import numpy as np

from ddpdoctor.measure.numerics import Ints, Mask, covered, holds, union
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.trace import RankTrace, classify

from .collectives import ENGINE, Collectives
from .window import ROUNDING_NS

_ENGINE_GAP_NS = 1_000_000
"""The engine issues a bucket's reduction between two of its functions, in a gap of microseconds."""

_AT_ONCE_NS = 2_000_000
"""From a call to its run, with none running meanwhile: a thread that waits for work takes it in tens of microseconds, on a busy
machine once it has a CPU."""
_LONGER = 10.0
"""Times the usual such time, where that is long: beyond, a run is another call's, which was not recorded."""


def collectives_of_gloo(trace: RankTrace) -> Collectives:
    """The collectives that Gloo annotated: the call on the issuing thread is the arrival; the run loop's event, which
    starts later, tells the end."""
    annotated = trace.category_mask("user_annotation", "cpu_op")
    runs = np.flatnonzero(annotated & trace.name_mask(classify.is_gloo))
    runs = runs[np.argsort(trace.start_ns[runs], kind="stable")]
    operation = [_operation(trace, int(row)) or "unknown" for row in runs]
    start = _issued(trace, runs, operation)
    unknown, count = np.full(len(runs), -1, np.int64), len(runs)
    return Collectives(
        start=start,
        end=trace.end_ns[runs],
        issued=start,
        launch_seen=np.ones(count, bool),
        operation=operation,
        group=[""] * count,
        group_size=unknown,
        sequence=unknown,
        bytes=np.full(count, np.nan),
        kind=_kinds(trace, operation, start),
        point_to_point=np.zeros(count, bool),
        ready=start,
    )


def _operation(trace: RankTrace, row: int) -> str:
    """The operation of a whole group that the event's name says; "" where it says none, or one between two ranks."""
    operation = classify.communication_operation(trace.name_of(row))
    return operation if operation is not None and operation != "sendrecv" else ""


def _issued(trace: RankTrace, runs: Ints, operation: list[str]) -> Ints:
    """[M] start of the call that issued each run, in the order of both; of the run itself where that call is not recorded."""
    calls = np.flatnonzero(trace.category_mask("cpu_op") & trace.name_mask(lambda n: n.startswith("c10d::")))
    calls = calls[np.argsort(trace.start_ns[calls], kind="stable")]
    calling = np.array([_operation(trace, int(row)) for row in calls], dtype=str)
    running = np.array(operation, dtype=str)
    issued = trace.start_ns[runs].astype(np.int64)
    for name in set(operation):
        of_name = np.flatnonzero(running == name)
        called = trace.start_ns[calls[calling == name]]
        call = _calls_of(called, trace.start_ns[runs[of_name]], trace.end_ns[runs[of_name]])
        issued[of_name[call >= 0]] = called[call[call >= 0]]
    return issued


def _calls_of(called: Ints, start: Ints, end: Ints) -> Ints:
    """[M] which of the calls [N] each run from ``start`` to ``end`` is, all in order; -1: none that is recorded.

    No run starts before its call, and none is left when the next burst of calls begins. So each burst shows how many calls
    without a run, and runs without a call, there were before: a lost event does not make all later runs those of other calls.
    """
    if not len(called) or not len(start):
        return np.full(len(start), -1, np.int64)
    most_ahead = np.searchsorted(called, start + ROUNDING_NS, side="right") - 1 - np.arange(len(start))
    begins, ends = union(start, end)
    run = np.searchsorted(begins, called, side="right") - 1
    quiet = np.flatnonzero((run < 0) | (called >= ends[np.maximum(run, 0)]))
    first = quiet[np.unique(run[quiet], return_index=True)[1]]
    burst = int(np.diff(first, prepend=0, append=len(called)).max())
    ahead = _least_of_next(most_ahead, burst)
    # Behind a loss the next burst tells, before it the last one, but for the first burst.
    ahead[burst - 1 :] = np.maximum(ahead, _least_of_next(most_ahead[::-1], burst)[::-1])[burst - 1 :]
    call: Ints = np.arange(len(start)) + ahead
    call[(call < 0) | (call >= len(called))] = -1
    call[1:][call[1:] <= np.maximum.accumulate(call)[:-1]] = -1
    since = called[np.maximum(call, 0)]
    idle = np.where(call >= 0, (start - since) - covered((begins, ends), since, start), 0.0)
    call[idle > max(_AT_ONCE_NS, _LONGER * float(np.median(idle)))] = -1
    return call


def _least_of_next(values: Ints, count: int) -> Ints:
    """[M] the least of each value and those behind it, of so many in all."""
    least, width = values.copy(), 1
    while width < min(count, len(values)):
        further = min(width, count - width)
        least = np.minimum(least, np.append(least[further:], np.full(further, least[-1])))
        width += further
    return least


def _kinds(trace: RankTrace, operation: list[str], issued: Ints) -> list[SyncKind]:
    """[M] what each collective is for: in the backward pass it reduces gradients, else the script called it."""
    engine = trace.name_ids(lambda n: n.startswith(ENGINE))
    functions = np.isin(trace.name, engine)
    in_backward = _inside(trace, functions, issued) if len(engine) else np.ones(len(issued), bool)
    return [
        SyncKind.BARRIER if name == "barrier" else SyncKind.GRADIENTS if backward else SyncKind.COLLECTIVE
        for name, backward in zip(operation, in_backward, strict=True)
    ]


def _inside(trace: RankTrace, functions: Mask, at: Ints) -> Mask:
    """[M] which times lie in one of these events, or closely behind it."""
    starts, ends = union(trace.start_ns[functions], trace.end_ns[functions])
    return holds((starts, ends + _ENGINE_GAP_NS), at)
