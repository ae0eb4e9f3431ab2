"""Which kernel is which of NCCL's calls: their payloads tell the communicator and the size of what the kernel moves.

A kernel is launched within its call, or within the ``ncclGroupEnd`` of the group to which the call belongs. Where a group has
several calls, or a call several kernels, nobody knows which is which.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.trace import classify
from ddpdoctor.trace.columns import Collectives, IntColumn, RankTrace

from .build import Mark
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
"""Calls whose kernels are one collective each."""
_TRAFFIC = frozenset(
    (*_OPERATIONS, "ncclSend", "ncclRecv", "ncclAlltoAll", "ncclAllToAll", "ncclGather", "ncclScatter")
)
_OF_ALL = ("allgather", "reducescatter")
"""The size that NCCL tells of them is one rank's part; what PyTorch tells is the whole."""
_DTYPE = "byte"
"""Sizes are counted in bytes."""
_CALLS = ("cuda_runtime", "cuda_driver")


class _Launching(msgspec.Struct, frozen=True):
    """A range in which NCCL launches, and the calls that it launches there."""

    start: int
    end: int
    calls: tuple[int, ...]


def with_collectives(
    trace: RankTrace, calls: Sequence[Mark], made: Sequence[Fields], lane_of: Mapping[int, int], base_ns: int
) -> RankTrace:
    """The trace with what NCCL's ``calls`` say of its kernels, their times as in the file, where they count from ``base_ns``; ``made``
    are the communicators that were made while it was recorded, ``lane_of`` tells the lane of each thread."""
    sizes = {one[COMMUNICATOR]: one[RANKS] for one in made if COMMUNICATOR in one and RANKS in one}
    table: dict[str, list[int]] = defaultdict(list)
    names = list(trace.names)
    number = {name: i for i, name in enumerate(names)}

    def named(text: str) -> int:
        if text not in number:
            number[text] = len(names)
            names.append(text)
        return number[text]

    for kernel, call in sorted(_pairs(trace, calls, lane_of, base_ns)):
        payload, operation = calls[call].payload, _OPERATIONS[calls[call].name]
        if not payload:
            continue
        group = payload.get(COMMUNICATOR)
        elements = _bytes(operation, payload, sizes)
        table["event"].append(kernel)
        table["operation"].append(named(operation))
        table["group"].append(named(f"{group:#x}") if group is not None else -1)
        table["group_size"].append(sizes.get(group, -1) if group is not None else -1)
        table["in_elements"].append(elements)
        table["dtype"].append(named(_DTYPE) if elements >= 0 else -1)
    return replace(trace, names=names, collectives=Collectives.of(table))


def _bytes(operation: str, payload: Fields, sizes: Mapping[int, int]) -> int:
    """What a rank contributes or gets, whichever is more; -1 unknown."""
    told = payload.get(MESSAGE_BYTES, -1)
    ranks = sizes.get(payload.get(COMMUNICATOR, -1), -1) if operation in _OF_ALL else 1
    whole = told * ranks
    return whole if told >= 0 and ranks > 0 and whole < 2**62 else -1


def _pairs(
    trace: RankTrace, calls: Sequence[Mark], lane_of: Mapping[int, int], base_ns: int
) -> Iterator[tuple[int, int]]:
    """(Kernel's row in the trace, place in ``calls``) of each kernel that is one call's alone."""
    launched = _launches(trace)
    threads: dict[int, list[int]] = defaultdict(list)
    for i, made in enumerate(calls):
        threads[made.thread].append(i)
    for thread, own in threads.items():
        lane = lane_of.get(thread)
        launching = list(_launching(sorted(own, key=lambda i: (calls[i].start, -calls[i].end)), calls))
        if lane is None or not launching:
            continue
        starts = np.array([one.start for one in launching], np.int64) + base_ns
        here = launched.get(lane, [])
        moments: IntColumn = np.array([at for _, at in here], np.int64)
        places: IntColumn = np.searchsorted(starts, moments, side="right") - 1
        found = [
            (kernel, place)
            for (kernel, at), place in zip(here, places.tolist(), strict=True)
            if place >= 0 and at < launching[place].end + base_ns
        ]
        many = Counter(place for _, place in found)
        for kernel, place in found:
            if many[place] == 1 and len(launching[place].calls) == 1:
                call = launching[place].calls[0]
                if calls[call].name in _OPERATIONS:
                    yield kernel, call


def _launches(trace: RankTrace) -> dict[int, list[tuple[int, int]]]:
    """Lane → (row of a communication kernel, time of the call that launched it) of those that were launched there."""
    kernels = np.flatnonzero(
        trace.category_mask("kernel") & trace.name_mask(classify.is_communication_kernel)
    )
    rows = np.flatnonzero(trace.category_mask(*_CALLS) & (trace.correlation >= 0))
    by_number: dict[int, int] = dict(zip(trace.correlation[rows].tolist(), rows.tolist(), strict=True))
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for kernel, number in zip(kernels.tolist(), trace.correlation[kernels].tolist(), strict=True):
        if number >= 0 and (row := by_number.get(number)) is not None:
            found[int(trace.lane[row])].append((kernel, int(trace.start_ns[row])))
    return found


def _launching(own: Sequence[int], calls: Sequence[Mark]) -> Iterator[_Launching]:
    """The ranges of one thread in which NCCL launches, in order."""
    depth = 0
    grouped: list[int] = []
    for i in own:
        name = calls[i].name
        if name == _BEGIN:
            depth += 1
        elif name == _END:
            depth = max(0, depth - 1)
            if not depth:
                yield _Launching(calls[i].start, calls[i].end, tuple(grouped))
                grouped = []
        elif name in _TRAFFIC:
            if depth:
                grouped.append(i)
            else:
                yield _Launching(calls[i].start, calls[i].end, (i,))
