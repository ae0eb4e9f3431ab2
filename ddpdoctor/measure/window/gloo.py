"""Collectives on CPUs: Gloo's annotations, paired with the calls that issued them."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from ddpdoctor.measure.numerics import Ints, Mask, union
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.trace import RankTrace, classify

from .collectives import ENGINE, Collectives

_ENGINE_GAP_NS = 1_000_000
"""The engine issues a bucket's reduction between two of its functions, in a gap of microseconds."""


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
    """[M] start of the first call for the same operation that no earlier run has taken; of the run itself where none
    came before its end."""
    calls = np.flatnonzero(trace.category_mask("cpu_op") & trace.name_mask(lambda n: n.startswith("c10d::")))
    waiting: dict[str, deque[int]] = defaultdict(deque)
    for row in calls[np.argsort(trace.start_ns[calls], kind="stable")]:
        waiting[_operation(trace, int(row))].append(int(row))
    issued = trace.start_ns[runs].astype(np.int64)
    for i, (row, name) in enumerate(zip(runs, operation, strict=True)):
        queue = waiting.get(name)
        if queue and trace.start_ns[queue[0]] <= trace.end_ns[row]:
            issued[i] = trace.start_ns[queue.popleft()]
    return issued


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
    if not len(starts):
        return np.zeros(len(at), bool)
    index = np.searchsorted(starts, at, side="right") - 1
    inside: Mask = (index >= 0) & (at < ends[np.maximum(index, 0)] + _ENGINE_GAP_NS)
    return inside
