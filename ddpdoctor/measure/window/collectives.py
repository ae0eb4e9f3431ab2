"""A rank's collectives in its profiler window: NCCL kernels with their metadata, or Gloo's events."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.trace import RankTrace, classify

_ELEMENT_BYTES = {
    "float": 4, "float32": 4, "half": 2, "float16": 2, "bfloat16": 2, "double": 8, "float64": 8, "long": 8, "int64": 8,
    "int": 4, "int32": 4, "short": 2, "int16": 2, "char": 1, "int8": 1, "byte": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
_ENGINE = "autograd::engine::evaluate_function"
_SMALL_BYTES = 1 << 20
_BARRIER_BYTES = 8


@dataclass
class Comms:
    """Collectives of one rank in order of start; M rows. Times int64 ns."""

    start: NDArray[np.int64]
    """When this rank's part can start: its kernel's start; on the CPU, when it issued the collective."""
    end: NDArray[np.int64]
    issued: NDArray[np.int64]
    """When the host launched it; the start where that is not known."""
    operation: list[str]
    group: list[str]
    """Process group, "" where the trace does not say."""
    size: NDArray[np.int64]
    """Ranks in the group; -1 unknown."""
    sequence: NDArray[np.int64]
    """Number in the group; -1 unknown."""
    bytes: NDArray[np.float64]
    """Bytes that the rank contributes; NaN unknown."""
    kind: list[str]
    point_to_point: NDArray[np.bool_]
    row: NDArray[np.int64]
    """Event in the trace."""
    ready: NDArray[np.int64]
    """When this rank's part could have started had the collectives before it been over: the computation that it
    waits for is done, and the host has launched it. Not after the start."""

    def shift(self, offset_ns: int) -> None:
        """Move all times."""
        self.start = self.start + offset_ns
        self.end = self.end + offset_ns
        self.issued = self.issued + offset_ns
        self.ready = self.ready + offset_ns

    def __len__(self) -> int:
        return len(self.start)

    def take(self, index: NDArray[np.int64]) -> Comms:
        """The chosen rows."""
        return Comms(
            self.start[index], self.end[index], self.issued[index], [self.operation[i] for i in index],
            [self.group[i] for i in index], self.size[index], self.sequence[index], self.bytes[index],
            [self.kind[i] for i in index], self.point_to_point[index], self.row[index],
            self.ready[index],
        )  # fmt: skip


def find_comms(trace: RankTrace, main: int) -> Comms:
    """NCCL-like kernels where there are any, else Gloo's annotations paired with the calls that issued
    them."""
    kernels = np.flatnonzero(
        trace.category_mask("kernel") & trace.name_mask(classify.is_communication_kernel)
    )
    return _from_kernels(trace, kernels, main) if len(kernels) else _from_gloo(trace, main)


def _from_kernels(trace: RankTrace, rows: NDArray[np.int64], main: int) -> Comms:
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    meta = _metadata(trace, rows)
    launch_row = launches(trace, rows)
    issued = np.where(launch_row >= 0, trace.start_ns[np.clip(launch_row, 0, None)], trace.start_ns[rows])
    names = [trace.name_of(r) for r in rows]
    table = trace.collectives
    operation, group, size, sequence, size_bytes = [], [], [], [], []
    for name, m in zip(names, meta, strict=True):
        said = trace.names[table.operation[m]] if m >= 0 and table.operation[m] >= 0 else ""
        operation.append(
            classify.communication_operation(said) or classify.communication_operation(name) or "unknown"
        )
        group.append(trace.names[table.group[m]] if m >= 0 and table.group[m] >= 0 else "")
        size.append(int(table.group_size[m]) if m >= 0 else -1)
        sequence.append(int(table.sequence[m]) if m >= 0 else -1)
        size_bytes.append(_bytes(trace, m, operation[-1]))
    # NCCL runs an all-to-all as one SendRecv kernel: only metadata can say that such a kernel is a true
    # point-to-point operation.
    point = np.array([op == "sendrecv" and m >= 0 for op, m in zip(operation, meta, strict=True)], bool)
    kind = _kinds(trace, main, launch_row, issued, operation, np.array(size_bytes, float))
    return Comms(
        trace.start_ns[rows], trace.end_ns[rows], issued, operation, group, np.array(size, np.int64),
        np.array(sequence, np.int64), np.array(size_bytes, float), kind, point, rows,
        _ready(trace, issued, trace.start_ns[rows]),
    )  # fmt: skip


def _ready(trace: RankTrace, issued: NDArray[np.int64], start: NDArray[np.int64]) -> NDArray[np.int64]:
    """[M] end of the last computation that was launched before the collective: its stream waits for an event there."""
    computes = trace.category_mask("kernel", "gpu_memset") & ~classify.communication_kernels(trace)
    rows = np.flatnonzero(computes)
    launch_row = launches(trace, rows)
    rows, launch_row = rows[launch_row >= 0], launch_row[launch_row >= 0]
    order = np.argsort(trace.start_ns[launch_row], kind="stable")
    launched, done = trace.start_ns[launch_row][order], np.maximum.accumulate(trace.end_ns[rows][order])
    if not len(done):
        return start.copy()
    before = np.searchsorted(launched, issued) - 1
    computed = np.where(before >= 0, done[np.clip(before, 0, None)], issued)
    ready: NDArray[np.int64] = np.minimum(np.maximum(issued, computed), start)
    return ready


def _metadata(trace: RankTrace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """[M] row in ``trace.collectives``: the kernel's own, else that of its ``record_param_comms`` by External
    id; -1 without."""
    table = trace.collectives
    own = {int(event): i for i, event in enumerate(table.event)}
    by_operator = {
        int(trace.external_id[event]): i
        for i, event in enumerate(table.event)
        if trace.external_id[event] >= 0
    }
    return np.array([own.get(int(r), by_operator.get(int(trace.external_id[r]), -1)) for r in rows], np.int64)


def launches(trace: RankTrace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """[M] row of the runtime call that launched each kernel, else of the operator that did (by External id); -1
    without."""
    calls = np.flatnonzero(
        trace.category_mask("cuda_runtime", "cuda_driver", "xpu_runtime") & (trace.correlation >= 0)
    )
    launched = rows_with_number(calls, trace.correlation[calls], trace.correlation[rows])
    if (launched < 0).any():
        operators = np.flatnonzero(trace.category_mask("cpu_op") & (trace.external_id >= 0))
        by_id = rows_with_number(operators, trace.external_id[operators], trace.external_id[rows])
        launched = np.where(launched < 0, by_id, launched)
    return launched


def rows_with_number(
    rows: NDArray[np.int64], numbers: NDArray[np.int64], wanted: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[wanted] the last of ``rows`` that has each wanted number; -1 without."""
    if not len(rows):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(numbers, kind="stable")
    place = np.searchsorted(numbers[order], wanted, side="right") - 1
    found = rows[order[np.maximum(place, 0)]]
    same = (place >= 0) & (numbers[order[np.maximum(place, 0)]] == wanted)
    result: NDArray[np.int64] = np.where(same, found, -1)
    return result


def _bytes(trace: RankTrace, m: int, operation: str) -> float:
    if m < 0:
        return float("nan")
    table = trace.collectives
    # nccl-tests count the larger side: what an allgather puts out, what a reduce-scatter takes in.
    elements = max(int(table.in_elements[m]), int(table.out_elements[m]))
    dtype = trace.names[table.dtype[m]].lower() if table.dtype[m] >= 0 else ""
    return (
        float(elements * _ELEMENT_BYTES[dtype]) if elements >= 0 and dtype in _ELEMENT_BYTES else float("nan")
    )


def _kinds(
    trace: RankTrace,
    main: int,
    launch_row: NDArray[np.int64],
    issued: NDArray[np.int64],
    operation: list[str],
    size_bytes: NDArray[np.float64],
) -> list[str]:
    """What each collective is for: launched by the backward pass's thread, inside DDP's forward, or by the
    script itself."""
    forward = trace.name_mask(classify.is_ddp_forward) & trace.category_mask("user_annotation", "cpu_op")
    forward_start, forward_end = trace.start_ns[forward], trace.end_ns[forward]
    has_ddp = bool(forward.any())
    of_layer = _inside_layers(trace, launch_row, issued)
    kinds: list[str] = []
    for row, at, op, size, layer in zip(launch_row, issued, operation, size_bytes, of_layer, strict=True):
        on_main = row >= 0 and int(trace.lane[row]) == main
        in_forward = bool(((forward_start <= at) & (at < forward_end)).any())
        if op == "barrier" or (op == "allreduce" and size <= _BARRIER_BYTES and on_main and not in_forward):
            kinds.append(SyncKind.BARRIER if op == "barrier" else SyncKind.COLLECTIVE)
        elif op == "broadcast" and in_forward:
            kinds.append(SyncKind.BROADCAST)
        elif op in ("alltoall", "sendrecv", "send", "recv") or in_forward or (op == "allreduce" and layer):
            kinds.append(SyncKind.MODEL)
        elif on_main and has_ddp and size <= _SMALL_BYTES:
            kinds.append(SyncKind.COLLECTIVE)
        else:
            kinds.append(SyncKind.GRADIENTS)
    return kinds


def _inside_layers(
    trace: RankTrace, launch_row: NDArray[np.int64], issued: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which collectives a layer's own backward issues, as SyncBatchNorm's and tensor parallelism's do. Gradients are reduced
    by hooks of their accumulation, or between two functions of the engine."""
    rows = np.flatnonzero(trace.name_mask(lambda n: n.startswith(_ENGINE)))
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    found = np.zeros(len(issued), bool)
    for lane in np.unique(trace.lane[rows]):
        own = rows[trace.lane[rows] == lane]
        mine = np.flatnonzero((launch_row >= 0) & (trace.lane[launch_row] == lane))
        place = np.searchsorted(trace.start_ns[own], issued[mine], side="right") - 1
        function = own[np.maximum(place, 0)]
        inside = (place >= 0) & (issued[mine] < trace.end_ns[function])
        accumulates = np.isin(trace.name[function], trace.name_ids(lambda n: "AccumulateGrad" in n))
        found[mine] = inside & ~accumulates
    return found


def _of_group(name: str) -> str:
    """The operation of a whole group that ``name`` says; "" where it says none, or one between two ranks."""
    operation = classify.communication_operation(name)
    return operation if operation is not None and operation != "sendrecv" else ""


def _from_gloo(trace: RankTrace, main: int) -> Comms:
    """Gloo: the call on the issuing thread is the arrival; the run loop's event, which starts later, tells
    the end."""
    annotated = trace.category_mask("user_annotation", "cpu_op")
    runs = np.flatnonzero(annotated & trace.name_mask(classify.is_gloo))
    runs = runs[np.argsort(trace.start_ns[runs], kind="stable")]
    calls = np.flatnonzero(trace.category_mask("cpu_op") & trace.name_mask(lambda n: n.startswith("c10d::")))
    calls = calls[np.argsort(trace.start_ns[calls], kind="stable")]
    waiting: dict[str, list[int]] = {}
    for row in calls:
        waiting.setdefault(_of_group(trace.name_of(int(row))), []).append(int(row))
    start, end, operation, kept = [], [], [], []
    kind: list[str] = []
    backward = trace.name_ids(lambda n: n.startswith(_ENGINE))
    in_backward = _covering(trace, np.isin(trace.name, backward))
    for row in runs:
        op = _of_group(trace.name_of(int(row))) or "unknown"
        queue = waiting.get(op) or []
        issue = queue.pop(0) if queue and trace.start_ns[queue[0]] <= trace.end_ns[row] else None
        at = int(trace.start_ns[issue]) if issue is not None else int(trace.start_ns[row])
        start.append(at)
        end.append(int(trace.end_ns[row]))
        operation.append(op)
        kept.append(int(row))
        kind.append(
            SyncKind.BARRIER
            if op == "barrier"
            else SyncKind.GRADIENTS
            if in_backward(at) or not len(backward)
            else SyncKind.COLLECTIVE
        )
    count = len(kept)
    unknown = np.full(count, -1, np.int64)
    return Comms(
        np.array(start, np.int64), np.array(end, np.int64), np.array(start, np.int64), operation, [""] * count, unknown,
        unknown.copy(), np.full(count, np.nan), kind, np.zeros(count, bool), np.array(kept, np.int64),
        np.array(start, np.int64),
    )  # fmt: skip


def _covering(trace: RankTrace, mask: NDArray[np.bool_]):  # type: ignore[no-untyped-def]
    from ddpdoctor.measure.numerics import union

    starts, ends = union(trace.start_ns[mask], trace.end_ns[mask])

    def inside(at: int) -> bool:
        index = int(np.searchsorted(starts, at, side="right")) - 1
        # The engine issues a bucket's reduction between two of its functions, in a gap of microseconds.
        return index >= 0 and at < int(ends[index]) + 1_000_000

    return inside
