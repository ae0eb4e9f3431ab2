"""Read a rank's collectives in its profiler window as columns: on a device from NCCL-like kernels, with the metadata of newer traces; on
CPUs from Gloo's annotations, paired with the calls that issued them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Array, Ints, Mask, covered, holds, place_in, union
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.trace import RankTrace, classify

from .launches import launches, rows_with_number

ROUNDING_NS = 1_000
"""Clocks are read to the microsecond, so an event may seem to start this much before the end of the event that it follows."""

ENGINE = "autograd::engine::evaluate_function"
"""Prefix of the names of the autograd engine's functions (torch/csrc/autograd/engine.cpp)."""


class Collectives(msgspec.Struct, frozen=True):
    """Collectives of one rank in order of start; M rows. Times are int64 ns."""

    start: Ints
    """When this rank's part can start: its kernel's start; on the CPU, when it issued the collective."""
    end: Ints
    issued: Ints
    """When the host launched it; its start if unknown."""
    launch_known: Mask
    """Whether the launch time is known."""
    operation: Sequence[str]
    group: Sequence[str]
    """Process group; "" if unknown."""
    group_size: Ints
    """Ranks in the process group; -1 if unknown."""
    sequence: Ints
    """Sequence number in the group; -1 if unknown."""
    bytes: Array
    """Bytes that the rank contributes; NaN if unknown."""
    kind: Sequence[SyncKind]
    point_to_point: Mask
    ready: Ints
    """When this rank's part could have started if the previous collectives had been over: the computation that it waits for is done, and
    the host has launched it. At most the start."""
    stream: Ints = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    """[M] the device's stream; empty on CPUs."""
    computed: Ints = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    """Ends of the device's kernels other than collectives, in order, if no launch of a collective is known; else empty. ``ready`` of a
    queued collective is then the last of these before its start, although it may have been ready much earlier."""

    def __len__(self) -> int:
        return len(self.start)

    def of_kind(self, kind: SyncKind) -> Mask:
        """Return [M] whether each collective is of this kind."""
        return np.array([own == kind for own in self.kind], bool)

    def shifted(self, offset_ns: int) -> Collectives:
        """Return the collectives with all times moved by ``offset_ns``."""
        times = ("start", "end", "issued", "ready", "computed")
        return replace(self, **{name: getattr(self, name) + offset_ns for name in times})


_ELEMENT_BYTES = {
    "float": 4, "float32": 4, "half": 2, "float16": 2, "bfloat16": 2, "double": 8, "float64": 8, "long": 8, "int64": 8,
    "int": 4, "int32": 4, "short": 2, "int16": 2, "char": 1, "int8": 1, "byte": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Element sizes of torch's types, by their names in traces."""
_SMALL_BYTES = 1 << 20
"""Largest reduction that may be a script's own. Losses and metrics are kilobytes; DDP's first bucket, its smallest, has 1 MiB."""
_BARRIER_BYTES = 8
"""Largest allreduce that may be a barrier. NCCL has no barrier, so torch uses an allreduce of a single element."""
_MODEL_OPERATIONS = ("alltoall", "sendrecv", "send", "recv")
"""Operations that DDP does not use, so that they are the model's own."""


def collectives_of_kernels(trace: RankTrace, kernels: Ints, main: int) -> Collectives:
    """Return the collectives of the kernels in these rows; ``main`` is the training thread's lane."""
    rows = kernels[np.argsort(trace.start_ns[kernels], kind="stable")]
    start, call = trace.start_ns[rows], launches(trace, rows)
    at = np.where(call >= 0, trace.start_ns[call], start)
    table = trace.collectives
    # [M] row in the table: the kernel's own, else that of its ``record_param_comms`` by External id, else -1.
    own = rows_with_number(np.arange(len(table.event)), table.event.astype(np.int64), rows)
    with_id = np.flatnonzero(trace.external_id[table.event] >= 0)
    by_operator = rows_with_number(with_id, trace.external_id[table.event[with_id]], trace.external_id[rows])
    entries = np.where(own >= 0, own, by_operator).tolist()
    operation = [_operation(trace, int(row), entry) for row, entry in zip(rows, entries, strict=True)]
    groups = [table.group[entry] if entry >= 0 else -1 for entry in entries]
    size = np.array([_message_bytes(trace, entry) for entry in entries], float)
    # NCCL runs an all-to-all as one SendRecv kernel, so only metadata shows that a kernel is a true point-to-point operation.
    point = [op == "sendrecv" and entry >= 0 for op, entry in zip(operation, entries, strict=True)]
    # Used as ``ready`` without a launch: the end of the last kernel that finished before the collective started.
    ends = np.sort(trace.end_ns[_computation_mask(trace)])
    over = np.searchsorted(ends, start, side="right")
    computed = np.where(over > 0, np.append(ends, 0)[over - 1], start)
    return Collectives(
        start=start,
        end=trace.end_ns[rows],
        issued=at,
        launch_known=call >= 0,
        operation=operation,
        group=[trace.names[name_id] if name_id >= 0 else "" for name_id in groups],
        group_size=np.array([table.group_size[m] if m >= 0 else -1 for m in entries], np.int64),
        sequence=np.array([table.sequence[m] if m >= 0 else -1 for m in entries], np.int64),
        bytes=size,
        kind=_kinds(trace, main, call, at, operation, size),
        point_to_point=np.array(point, bool),
        ready=np.where(call >= 0, _ready_times(trace, at, start), computed),
        stream=trace.stream[rows].astype(np.int64),
        **({} if (call >= 0).any() else {"computed": ends}),
    )


def _operation(trace: RankTrace, row: int, entry: int) -> str:
    name_id = trace.collectives.operation[entry] if entry >= 0 else -1
    names = [trace.names[name_id]] if name_id >= 0 else []
    operations = map(classify.communication_operation, [*names, trace.name_of(row)])
    return next((operation for operation in operations if operation), "unknown")


def _message_bytes(trace: RankTrace, entry: int) -> float:
    if entry < 0:
        return float("nan")
    table = trace.collectives
    # nccl-tests count the larger side: the output of an allgather, the input of a reduce-scatter.
    elements = max(int(table.in_elements[entry]), int(table.out_elements[entry]))
    dtype = trace.names[table.dtype[entry]].lower() if table.dtype[entry] >= 0 else ""
    known = elements >= 0 and dtype in _ELEMENT_BYTES
    return float(elements * _ELEMENT_BYTES[dtype]) if known else float("nan")


def _ready_times(trace: RankTrace, issued: Ints, start: Ints) -> Ints:
    """[M] when each collective was issued and the computation that was launched before it (its stream waits for that) was done."""
    rows = np.flatnonzero(_computation_mask(trace))
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


def _computation_mask(trace: RankTrace) -> Mask:
    return trace.category_mask("kernel", "gpu_memset") & ~classify.communication_kernels(trace)


def _kinds(
    trace: RankTrace, main: int, call: Ints, at: Ints, operation: list[str], size: Array
) -> list[SyncKind]:
    """[M] kind of each collective, by what issued it: the backward pass's thread, DDP's forward, a layer, or the script. ``call``: row of
    the call that issued it, -1 if unknown; ``at``: when, ns."""
    forward = trace.name_mask(classify.is_ddp_forward) & trace.category_mask("user_annotation", "cpu_op")
    in_forward = holds(union(trace.start_ns[forward], trace.end_ns[forward]), at)
    on_main = (call >= 0) & (trace.lane[call] == main)
    by_script = on_main & (size <= _SMALL_BYTES) if forward.any() else np.zeros(len(size), bool)
    by_layer = _inside_layers(trace, call, at)
    kinds: list[SyncKind] = []
    for i, op in enumerate(operation):
        if op == "barrier":
            kinds.append(SyncKind.BARRIER)
        elif op == "allreduce" and size[i] <= _BARRIER_BYTES and on_main[i] and not in_forward[i]:
            kinds.append(SyncKind.COLLECTIVE)
        elif op == "broadcast" and in_forward[i]:
            kinds.append(SyncKind.BROADCAST)
        elif op in _MODEL_OPERATIONS or in_forward[i] or (op == "allreduce" and by_layer[i]):
            kinds.append(SyncKind.MODEL)
        else:
            kinds.append(SyncKind.COLLECTIVE if by_script[i] else SyncKind.GRADIENTS)
    return kinds


def _inside_layers(trace: RankTrace, call: Ints, at: Ints) -> Mask:
    """[M] whether the backward function of a layer issues the collective, as in SyncBatchNorm and tensor parallelism.

    Reductions of gradients are issued by hooks of AccumulateGrad, or between two functions of the engine.
    """
    rows = np.flatnonzero(trace.name_mask(lambda n: n.startswith(ENGINE)))
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    accumulating = trace.name_ids(lambda n: "AccumulateGrad" in n)
    inside = np.zeros(len(at), bool)
    for lane in np.unique(trace.lane[rows]):
        functions = rows[trace.lane[rows] == lane]
        here = np.flatnonzero((call >= 0) & (trace.lane[call] == lane))
        place = place_in((trace.start_ns[functions], trace.end_ns[functions]), at[here])
        inside[here] = (place >= 0) & ~np.isin(trace.name[functions[place]], accumulating)
    return inside


_ENGINE_GAP_NS = 1_000_000
"""Longest gap between two functions of the engine in which a bucket's reduction is issued. Usual gaps are microseconds."""

_MOST_IDLE_NS = 2_000_000
"""Idle time of Gloo's threads from a call to a run, beyond which the run belongs to another, unrecorded call. An idle thread starts work
within tens of microseconds, on a busy host when it gets a CPU."""
_MOST_IDLE_RATIO = 10.0
"""The same as a multiple of the median idle time; the larger limit applies."""


def collectives_of_gloo(trace: RankTrace) -> Collectives:
    """Return the collectives that Gloo annotated. The rank arrives at the call on the issuing thread; the collective ends with the event of
    the run loop, which starts later."""
    annotated = trace.category_mask("user_annotation", "cpu_op")
    runs = np.flatnonzero(annotated & trace.name_mask(classify.is_gloo))
    runs = runs[np.argsort(trace.start_ns[runs], kind="stable")]
    operation = [_gloo_operation(trace, int(row)) or "unknown" for row in runs]
    start = _issue_times(trace, runs, operation)
    unknown, count = np.full(len(runs), -1, np.int64), len(runs)
    return Collectives(
        start=start,
        end=trace.end_ns[runs],
        issued=start,
        launch_known=np.ones(count, bool),
        operation=operation,
        group=[""] * count,
        group_size=unknown,
        sequence=unknown,
        bytes=np.full(count, np.nan),
        kind=_gloo_kinds(trace, operation, start),
        point_to_point=np.zeros(count, bool),
        ready=start,
    )


def _gloo_operation(trace: RankTrace, row: int) -> str:
    """The collective operation in the event's name; "" if there is none, or if it is between two ranks."""
    operation = classify.communication_operation(trace.name_of(row))
    return operation if operation is not None and operation != "sendrecv" else ""


def _issue_times(trace: RankTrace, runs: Ints, operation: list[str]) -> Ints:
    """[M] start of the call that issued each run (calls and runs have the same order), or of the run itself if no call was recorded."""
    calls = np.flatnonzero(trace.category_mask("cpu_op") & trace.name_mask(lambda n: n.startswith("c10d::")))
    calls = calls[np.argsort(trace.start_ns[calls], kind="stable")]
    calling = np.array([_gloo_operation(trace, int(row)) for row in calls], dtype=str)
    running = np.array(operation, dtype=str)
    issued = trace.start_ns[runs].astype(np.int64)
    for name in set(operation):
        of_name = np.flatnonzero(running == name)
        called = trace.start_ns[calls[calling == name]]
        call = _calls_of(called, trace.start_ns[runs[of_name]], trace.end_ns[runs[of_name]])
        issued[of_name[call >= 0]] = called[call[call >= 0]]
    return issued


def _calls_of(called: Ints, start: Ints, end: Ints) -> Ints:
    """[M] index of the call [N] that issued each run from ``start`` to ``end``; -1 if it was not recorded. Calls and runs are in order.

    No run starts before its call, and all runs end before the next burst of calls. So each burst shows how many calls without a run and
    runs without a call came before, and a lost event does not shift all later pairs.
    """
    if not len(called) or not len(start):
        return np.full(len(start), -1, np.int64)
    most_ahead = np.searchsorted(called, start + ROUNDING_NS, side="right") - 1 - np.arange(len(start))
    begins, ends = union(start, end)
    run = np.searchsorted(begins, called, side="right") - 1
    quiet = np.flatnonzero((run < 0) | (called >= ends[np.maximum(run, 0)]))
    first = quiet[np.unique(run[quiet], return_index=True)[1]]
    burst = int(np.diff(first, prepend=0, append=len(called)).max())
    ahead = _minimum_ahead(most_ahead, burst)
    # The next burst shows the shift after a lost event, and the previous one (except for the first burst) the shift before it.
    ahead[burst - 1 :] = np.maximum(ahead, _minimum_ahead(most_ahead[::-1], burst)[::-1])[burst - 1 :]
    call: Ints = np.arange(len(start)) + ahead
    call[(call < 0) | (call >= len(called))] = -1
    call[1:][call[1:] <= np.maximum.accumulate(call)[:-1]] = -1
    since = called[np.maximum(call, 0)]
    idle = np.where(call >= 0, (start - since) - covered((begins, ends), since, start), 0.0)
    call[idle > max(_MOST_IDLE_NS, _MOST_IDLE_RATIO * float(np.median(idle)))] = -1
    return call


def _minimum_ahead(values: Ints, count: int) -> Ints:
    """[M] minimum of ``count`` values from each one on."""
    least, width = values.copy(), 1
    while width < min(count, len(values)):
        further = min(width, count - width)
        least = np.minimum(least, np.append(least[further:], np.full(further, least[-1])))
        width += further
    return least


def _gloo_kinds(trace: RankTrace, operation: list[str], issued: Ints) -> list[SyncKind]:
    """[M] kind of each collective: barrier, else gradients if issued in the backward pass, else called by the script."""
    engine = trace.name_ids(lambda n: n.startswith(ENGINE))
    functions = np.isin(trace.name, engine)
    starts, ends = union(trace.start_ns[functions], trace.end_ns[functions])
    in_backward = (
        holds((starts, ends + _ENGINE_GAP_NS), issued) if len(engine) else np.ones(len(issued), bool)
    )
    return [
        SyncKind.BARRIER if name == "barrier" else SyncKind.GRADIENTS if backward else SyncKind.COLLECTIVE
        for name, backward in zip(operation, in_backward, strict=True)
    ]
