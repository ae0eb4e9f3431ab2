"""Replay a dependency graph of operations in streams, some of which are parts of collectives.

For operation *v* with the operations *P(v)* that must end before it may start, and the collective *G(v)* that
it is a part of (*v* alone if it is in no collective)

    start[v] = max(origin[v], max over P(v) of end) + delay[v]
    end[v]   = max over G(v) of start + work[v]

``work`` is the duration of a single operation, or the transfer of a part of a collective: the time from the last
member's start to its own end. ``delay`` is time that the graph does not explain (the host was late to launch).
The terms are those of Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis",
OSDI '25, section 3. With ``delay`` and ``work`` from :func:`measured_costs`, the replay reproduces the run.

A collective is one node of the graph, which is reached when all of its members may start. Nodes are replayed level by level, with a
few numpy calls per level, so the time of a replay depends more on the number of levels than of operations. Times are float64 in
the caller's unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.errors import UnusableInput

Times = NDArray[np.float64]
Indices = NDArray[np.int64]
Edges = tuple[Indices, Indices]
"""(before, after): operation ``before[i]`` must end before operation ``after[i]`` may start."""

ALONE = -1
"""Marks operations without a stream, without a collective, or without a neighbour."""


class Level(msgspec.Struct, frozen=True):
    """Operations whose predecessors are all in earlier levels."""

    operations: Indices
    """Single operations, then the members of collectives, grouped by collective."""
    with_predecessors: Indices
    """The ``operations`` that have predecessors."""
    sources: Indices
    """The predecessors of ``with_predecessors``, grouped by operation."""
    first_source: Indices
    """[with_predecessors] index into ``sources`` of each operation's first predecessor."""
    members: Indices
    """The ``operations`` that are members of collectives."""
    first_member: Indices
    """[collectives] index into ``members`` of each collective's first member."""
    size: Indices
    """[collectives] number of members."""


class Dag(msgspec.Struct, frozen=True):
    """A dependency graph of ``size`` operations."""

    size: int
    levels: tuple[Level, ...]


class Costs(msgspec.Struct, frozen=True):
    """Delay and work of each operation of a run."""

    delay: Times
    """[N]"""
    work: Times
    """[N]"""


def build_dag(size: int, edges: Sequence[Edges], collective: Indices) -> Dag:
    """Build the graph of ``size`` operations with these edges. Operations with the same number in ``collective`` [N] are parts of
    one collective; ``ALONE`` marks single operations.

    Raises UnusableInput if the graph has a cycle.
    """
    before = np.concatenate([np.empty(0, np.int64), *(pair[0] for pair in edges)])
    after = np.concatenate([np.empty(0, np.int64), *(pair[1] for pair in edges)])
    # A collective is one node. Single operations keep their numbers; collectives come after them.
    node = np.where(collective == ALONE, np.arange(size), size + collective).astype(np.int64)
    _, node = np.unique(node, return_inverse=True)
    level = _levels(node[before], node[after], int(node.max(initial=-1)) + 1)[node]
    order = np.argsort(after, kind="stable")
    before, after = before[order], after[order]
    # Within a level: single operations, then one collective after the other.
    by_level = np.lexsort((np.arange(size), collective, level))
    bounds = np.searchsorted(level[by_level], np.arange(int(level.max(initial=-1)) + 2))
    return Dag(
        size,
        tuple(_build_level(by_level[low:high], before, after, collective) for low, high in pairwise(bounds)),
    )


def _levels(before: Indices, after: Indices, nodes: int) -> Indices:
    """[nodes] length of the longest path, in edges, from a node without predecessors. Raises UnusableInput if there is a cycle."""
    waits_for = np.bincount(after, minlength=nodes)
    order = np.argsort(before, kind="stable")
    successors = after[order]
    first = np.searchsorted(before[order], np.arange(nodes + 1))
    level = np.full(nodes, -1, np.int64)
    frontier = np.flatnonzero(waits_for == 0)
    number = 0
    while len(frontier):
        level[frontier] = number
        reached, times = np.unique(
            successors[_ranges(first[frontier], first[frontier + 1])], return_counts=True
        )
        waits_for[reached] -= times
        frontier, number = reached[waits_for[reached] == 0], number + 1
    if (level < 0).any():
        raise UnusableInput(
            f"{int((level < 0).sum())} operations wait for each other in a circle, so the order in which they "
            "were recorded cannot be the one in which they ran."
        )
    return level


def _ranges(low: Indices, high: Indices) -> Indices:
    """The concatenation of the ranges from each ``low`` up to its ``high``."""
    counts = high - low
    positions: Indices = np.arange(int(counts.sum())) + np.repeat(low - np.cumsum(counts) + counts, counts)
    return positions


def _build_level(operations: Indices, before: Indices, after: Indices, collective: Indices) -> Level:
    low, high = np.searchsorted(after, operations), np.searchsorted(after, operations, side="right")
    with_predecessors = high > low
    sources = before[_ranges(low[with_predecessors], high[with_predecessors])]
    first_source = np.cumsum((high - low)[with_predecessors]) - (high - low)[with_predecessors]
    members = operations[collective[operations] != ALONE]
    _, first_member, sizes = np.unique(collective[members], return_index=True, return_counts=True)
    return Level(
        operations, operations[with_predecessors], sources, first_source, members, first_member, sizes
    )


def replay(dag: Dag, origin: Times, costs: Costs) -> tuple[Times, Times]:
    """Return [N] start and end of every operation."""
    start, end = origin.astype(np.float64), np.empty(dag.size)
    for level in dag.levels:
        _raise_starts(level, start, end)
        start[level.operations] += costs.delay[level.operations]
        end[level.operations] = start[level.operations] + costs.work[level.operations]
        if len(level.members):
            end[level.members] = _last_start(level, start) + costs.work[level.members]
    return start, end


def measured_costs(dag: Dag, origin: Times, start: Times, end: Times, tolerance: float = 0.0) -> Costs:
    """Return delay and work of each operation, from the times of the run ([N] each).

    If clocks disagree, an operation may start before its predecessor has ended, or end before the last member of its collective has
    started. A negative cost down to minus ``tolerance`` is kept, so that it cancels against that of a neighbour. A lower cost cannot be
    due to the clocks, and counts as 0.
    """
    ready, work = origin.astype(np.float64), end - start
    for level in dag.levels:
        _raise_starts(level, ready, end)
        if len(level.members):
            work[level.members] = end[level.members] - _last_start(level, start)
    delay = start - ready
    delay[delay < -tolerance] = 0.0
    work[work < -tolerance] = 0.0
    return Costs(delay, work)


def _raise_starts(level: Level, start: Times, end: Times) -> None:
    """Increase the starts of the level's operations, initially their origins, to the ends of their predecessors, in place."""
    if len(level.with_predecessors):
        ready = np.maximum.reduceat(end[level.sources], level.first_source)
        start[level.with_predecessors] = np.maximum(start[level.with_predecessors], ready)


def _last_start(level: Level, start: Times) -> Times:
    """[members] latest start among the members of each one's collective."""
    last = np.maximum.reduceat(start[level.members], level.first_member)
    repeated: Times = np.repeat(last, level.size)
    return repeated


def order_edges(stream: Indices, *keys: NDArray[np.generic]) -> Edges:
    """Return edges by which each operation of a stream waits for the previous one, in the order of ``keys`` (the most significant
    first). ``stream`` is [N], with ``ALONE`` for operations without a stream."""
    chosen = np.flatnonzero(stream != ALONE)
    order = chosen[np.lexsort((*(key[chosen] for key in reversed(keys)), stream[chosen]))]
    same = stream[order[1:]] == stream[order[:-1]]
    return order[:-1][same], order[1:][same]
