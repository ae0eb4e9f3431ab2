"""Collectives on a device: NCCL-like kernels, with the metadata that newer traces have of them."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import Ints, Mask, holds, union
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.trace import RankTrace, classify

from .collectives import ENGINE, Collectives
from .launches import launches

_ELEMENT_BYTES = {
    "float": 4, "float32": 4, "half": 2, "float16": 2, "bfloat16": 2, "double": 8, "float64": 8, "long": 8, "int64": 8,
    "int": 4, "int32": 4, "short": 2, "int16": 2, "char": 1, "int8": 1, "byte": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""torch's types of elements, as traces name them."""
_SMALL_BYTES = 1 << 20
"""A script beside DDP reduces losses and metrics, which are kilobytes; DDP's first bucket, its smallest, has 1 MiB."""
_BARRIER_BYTES = 8
"""NCCL has no barrier: torch makes one of an allreduce of a single element."""
_BETWEEN_RANKS = ("alltoall", "sendrecv", "send", "recv")
"""Operations that DDP has no use for: a model's own."""


class _Issue(msgspec.Struct, frozen=True):
    """Where the host launched collectives, [M]."""

    call: Ints
    """Row of the launching call; -1 unknown."""
    at: Ints
    """ns; the kernel's start where the call is unknown."""


def collectives_of_kernels(trace: RankTrace, kernels: Ints, main: int) -> Collectives:
    """The collectives that the kernels in these rows are; ``main`` is the training thread's lane."""
    rows = kernels[np.argsort(trace.start_ns[kernels], kind="stable")]
    start, call = trace.start_ns[rows], launches(trace, rows)
    issue = _Issue(call, np.where(call >= 0, trace.start_ns[np.clip(call, 0, None)], start))
    entries, table = _metadata(trace, rows), trace.collectives
    operation = [_operation(trace, int(row), entry) for row, entry in zip(rows, entries, strict=True)]
    size = np.array([_bytes(trace, entry) for entry in entries], float)
    # NCCL runs an all-to-all as one SendRecv kernel: only metadata can say that such a kernel is a true
    # point-to-point operation.
    point = [op == "sendrecv" and entry >= 0 for op, entry in zip(operation, entries, strict=True)]
    return Collectives(
        start=start,
        end=trace.end_ns[rows],
        issued=issue.at,
        launch_seen=issue.call >= 0,
        operation=operation,
        group=[_group(trace, entry) for entry in entries],
        group_size=np.array([table.group_size[m] if m >= 0 else -1 for m in entries], np.int64),
        sequence=np.array([table.sequence[m] if m >= 0 else -1 for m in entries], np.int64),
        bytes=size,
        kind=_kinds(trace, main, issue, operation, size),
        point_to_point=np.array(point, bool),
        ready=np.where(call >= 0, _ready(trace, issue.at, start), _computed(trace, start)),
    )


def _metadata(trace: RankTrace, rows: Ints) -> list[int]:
    """[M] row in ``trace.collectives``: the kernel's own, else that of its ``record_param_comms`` by External
    id; -1 without."""
    events = trace.collectives.event
    own = {int(event): i for i, event in enumerate(events)}
    by_operator = {
        int(trace.external_id[event]): i for i, event in enumerate(events) if trace.external_id[event] >= 0
    }
    return [own.get(int(row), by_operator.get(int(trace.external_id[row]), -1)) for row in rows]


def _operation(trace: RankTrace, row: int, entry: int) -> str:
    said = trace.collectives.operation[entry] if entry >= 0 else -1
    names = [trace.names[said]] if said >= 0 else []
    operations = map(classify.communication_operation, [*names, trace.name_of(row)])
    return next((operation for operation in operations if operation), "unknown")


def _group(trace: RankTrace, entry: int) -> str:
    said = trace.collectives.group[entry] if entry >= 0 else -1
    return trace.names[said] if said >= 0 else ""


def _bytes(trace: RankTrace, entry: int) -> float:
    if entry < 0:
        return float("nan")
    table = trace.collectives
    # nccl-tests count the larger side: what an allgather puts out, what a reduce-scatter takes in.
    elements = max(int(table.in_elements[entry]), int(table.out_elements[entry]))
    dtype = trace.names[table.dtype[entry]].lower() if table.dtype[entry] >= 0 else ""
    known = elements >= 0 and dtype in _ELEMENT_BYTES
    return float(elements * _ELEMENT_BYTES[dtype]) if known else float("nan")


def _ready(trace: RankTrace, issued: Ints, start: Ints) -> Ints:
    """[M] end of the last computation that was launched before the collective: its stream waits for an event there."""
    rows = np.flatnonzero(_computes(trace))
    calls = launches(trace, rows)
    rows, calls = rows[calls >= 0], calls[calls >= 0]
    order = np.argsort(trace.start_ns[calls], kind="stable")
    launched, done = trace.start_ns[calls][order], np.maximum.accumulate(trace.end_ns[rows][order])
    if not len(done):
        return start.copy()
    before = np.searchsorted(launched, issued) - 1
    computed = np.where(before >= 0, done[np.clip(before, 0, None)], issued)
    ready: Ints = np.minimum(np.maximum(issued, computed), start)
    return ready


def _computed(trace: RankTrace, start: Ints) -> Ints:
    """[M] end of the last computation that was over when the collective started: it waited for no later one."""
    ends = np.sort(trace.end_ns[_computes(trace)])
    over = np.searchsorted(ends, start, side="right") - 1
    ready: Ints = np.where(over >= 0, ends[np.clip(over, 0, None)], start) if len(ends) else start.copy()
    return ready


def _computes(trace: RankTrace) -> Mask:
    return trace.category_mask("kernel", "gpu_memset") & ~classify.communication_kernels(trace)


def _kinds(
    trace: RankTrace, main: int, issue: _Issue, operation: list[str], size: NDArray[np.float64]
) -> list[SyncKind]:
    """[M] what each collective is for: launched by the backward pass's thread, inside DDP's forward, or by the
    script itself."""
    forward = trace.name_mask(classify.is_ddp_forward) & trace.category_mask("user_annotation", "cpu_op")
    in_forward = holds(union(trace.start_ns[forward], trace.end_ns[forward]), issue.at)
    on_main = (issue.call >= 0) & (trace.lane[issue.call] == main)
    by_script = on_main & (size <= _SMALL_BYTES) if forward.any() else np.zeros(len(size), bool)
    a_layers = _inside_layers(trace, issue)
    kinds: list[SyncKind] = []
    for i, op in enumerate(operation):
        if op == "barrier":
            kinds.append(SyncKind.BARRIER)
        elif op == "allreduce" and size[i] <= _BARRIER_BYTES and on_main[i] and not in_forward[i]:
            kinds.append(SyncKind.COLLECTIVE)
        elif op == "broadcast" and in_forward[i]:
            kinds.append(SyncKind.BROADCAST)
        elif op in _BETWEEN_RANKS or in_forward[i] or (op == "allreduce" and a_layers[i]):
            kinds.append(SyncKind.MODEL)
        else:
            kinds.append(SyncKind.COLLECTIVE if by_script[i] else SyncKind.GRADIENTS)
    return kinds


def _inside_layers(trace: RankTrace, issue: _Issue) -> Mask:
    """[M] which collectives a layer's own backward issues, as SyncBatchNorm's and tensor parallelism's do.

    Gradients are reduced by hooks of their accumulation, or between two functions of the engine.
    """
    rows = np.flatnonzero(trace.name_mask(lambda n: n.startswith(ENGINE)))
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    accumulating = trace.name_ids(lambda n: "AccumulateGrad" in n)
    inside = np.zeros(len(issue.at), bool)
    for lane in np.unique(trace.lane[rows]):
        functions = rows[trace.lane[rows] == lane]
        issued_here = np.flatnonzero((issue.call >= 0) & (trace.lane[issue.call] == lane))
        at = issue.at[issued_here]
        place = np.searchsorted(trace.start_ns[functions], at, side="right") - 1
        function = functions[np.maximum(place, 0)]
        within = (place >= 0) & (at < trace.end_ns[function])
        inside[issued_here] = within & ~np.isin(trace.name[function], accumulating)
    return inside
