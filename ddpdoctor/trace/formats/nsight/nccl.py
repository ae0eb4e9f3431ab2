"""Matches NCCL kernels with NCCL's API calls, whose payloads contain the communicator and the message size.

A kernel is launched during its call, or during the ``ncclGroupEnd`` of the call's group. Groups with several calls, and calls with
several kernels, cannot be matched.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.trace import classify
from ddpdoctor.trace.columns import CUDA_CALLS, Collectives, IntColumn, Interner, RankTrace

from .build import NvtxRange
from .database import COMMUNICATOR, MESSAGE_BYTES, RANKS, Fields

_BEGIN, _END = "ncclGroupStart", "ncclGroupEnd"
_OPERATIONS = {
    "ncclAllReduce": "allreduce",
    "ncclAllGather": "allgather",
    "ncclReduceScatter": "reducescatter",
    "ncclBroadcast": "broadcast",
    "ncclBcast": "broadcast",
    "ncclReduce": "reduce",
}
"""Calls whose kernel is a single collective."""
_TRAFFIC = frozenset(
    (*_OPERATIONS, "ncclSend", "ncclRecv", "ncclAlltoAll", "ncclAllToAll", "ncclGather", "ncclScatter")
)
_PART_PER_RANK = ("allgather", "reducescatter")
"""Operations whose message size in NCCL is one rank's part; PyTorch's size is that of all parts."""
_DTYPE = "byte"
"""Element type, because sizes are in bytes."""


class _LaunchRange(msgspec.Struct, frozen=True):
    """A range during which NCCL launches kernels, and the calls whose kernels it launches."""

    start: int
    end: int
    calls: tuple[int, ...]


def with_collectives(
    trace: RankTrace,
    calls: Sequence[NvtxRange],
    communicators: Sequence[Fields],
    lane_of: Mapping[int, int],
    base_ns: int,
) -> RankTrace:
    """The trace with collective metadata from NCCL's ``calls``, whose times are relative to ``base_ns``. ``communicators``: those created
    during the recording. ``lane_of``: lane of each thread."""
    sizes = {one[COMMUNICATOR]: one[RANKS] for one in communicators if COMMUNICATOR in one and RANKS in one}
    table: dict[str, list[int]] = defaultdict(list)
    names = Interner()
    names.ids(trace.names)
    for kernel, call in sorted(_match_kernels(trace, calls, lane_of, base_ns)):
        payload, operation = calls[call].payload, _OPERATIONS[calls[call].name]
        if not payload:
            continue
        group = payload.get(COMMUNICATOR)
        elements = _bytes(operation, payload, sizes)
        table["event"].append(kernel)
        table["operation"].append(names[operation])
        table["group"].append(names[f"{group:#x}"] if group is not None else -1)
        table["group_size"].append(sizes.get(group, -1) if group is not None else -1)
        table["in_elements"].append(elements)
        table["dtype"].append(names[_DTYPE] if elements >= 0 else -1)
    return replace(trace, names=list(names), collectives=Collectives.of(table))


def _bytes(operation: str, payload: Fields, sizes: Mapping[int, int]) -> int:
    """The larger of the bytes that a rank sends and receives; -1 if unknown."""
    size = payload.get(MESSAGE_BYTES, -1)
    ranks = sizes.get(payload.get(COMMUNICATOR, -1), -1) if operation in _PART_PER_RANK else 1
    whole = size * ranks
    return whole if size >= 0 and ranks > 0 and whole < 2**62 else -1


def _match_kernels(
    trace: RankTrace, calls: Sequence[NvtxRange], lane_of: Mapping[int, int], base_ns: int
) -> Iterator[tuple[int, int]]:
    """Yields (row of the kernel in the trace, index in ``calls``) of each kernel that can be matched with a call."""
    launched = _launches(trace)
    threads: dict[int, list[int]] = defaultdict(list)
    for i, one in enumerate(calls):
        threads[one.thread].append(i)
    for thread, own in threads.items():
        lane = lane_of.get(thread)
        launches = list(_launch_ranges(sorted(own, key=lambda i: (calls[i].start, -calls[i].end)), calls))
        if lane is None or not launches:
            continue
        starts = np.array([one.start for one in launches], np.int64) + base_ns
        kernels_of_lane = launched.get(lane, [])
        moments: IntColumn = np.array([at for _, at in kernels_of_lane], np.int64)
        places: IntColumn = np.searchsorted(starts, moments, side="right") - 1
        matches = [
            (kernel, place)
            for (kernel, at), place in zip(kernels_of_lane, places.tolist(), strict=True)
            if place >= 0 and at < launches[place].end + base_ns
        ]
        many = Counter(place for _, place in matches)
        for kernel, place in matches:
            if many[place] == 1 and len(launches[place].calls) == 1:
                call = launches[place].calls[0]
                if calls[call].name in _OPERATIONS:
                    yield kernel, call


def _launches(trace: RankTrace) -> dict[int, list[tuple[int, int]]]:
    """Lane → list of (row of a communication kernel, start of the runtime call on this lane that launched it)."""
    kernels = np.flatnonzero(
        trace.category_mask("kernel") & trace.name_mask(classify.is_communication_kernel)
    )
    rows = np.flatnonzero(trace.category_mask(*CUDA_CALLS) & (trace.correlation >= 0))
    by_number: dict[int, int] = dict(zip(trace.correlation[rows].tolist(), rows.tolist(), strict=True))
    matches: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for kernel, number in zip(kernels.tolist(), trace.correlation[kernels].tolist(), strict=True):
        if number >= 0 and (row := by_number.get(number)) is not None:
            matches[int(trace.lane[row])].append((kernel, int(trace.start_ns[row])))
    return matches


def _launch_ranges(own: Sequence[int], calls: Sequence[NvtxRange]) -> Iterator[_LaunchRange]:
    """Yields the ranges of a thread during which NCCL launches kernels, in order."""
    depth = 0
    grouped: list[int] = []
    for i in own:
        name = calls[i].name
        if name == _BEGIN:
            depth += 1
        elif name == _END:
            depth = max(0, depth - 1)
            if not depth:
                yield _LaunchRange(calls[i].start, calls[i].end, tuple(grouped))
                grouped = []
        elif name in _TRAFFIC:
            if depth:
                grouped.append(i)
            else:
                yield _LaunchRange(calls[i].start, calls[i].end, (i,))
