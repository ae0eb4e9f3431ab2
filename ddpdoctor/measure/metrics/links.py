"""Which ranks' links are slower than others': only where the same transfer is made by several groups.

All members of a collective end together, so one group alone does not tell which of its links is slow. Where
several process groups reduce the same number of bytes with as many ranks on as many hosts, as tensor-parallel
groups do, their transfers can be compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.trace import classify

_SLOWER = 1.5
"""Times the other groups' median transfer: links of one kind differ by a few per cent, one that trained at half
its width or rate by a factor of two."""
_FEWEST = 3
"""Transfers of a group in a size class."""


def slow_link_ranks(graph: Graph, hosts: Sequence[str]) -> list[int] | None:
    """Ranks (numbers) of groups whose transfers are persistently slower than those of like groups; ``hosts`` by
    position. Of ranks in slow groups of several kinds (of both dimensions of a mesh, say), those that are in most.
    Empty where there are like groups and none is slower; None where groups cannot be compared."""
    compared = False
    slow: Counter[int] = Counter()
    flagged: set[tuple[int, ...]] = set()
    for groups in _alike(graph, hosts).values():
        known = {members: np.array(times) for members, times in groups.items() if len(times) >= _FEWEST}
        if len(known) < 2 or len(set().union(*known)) < sum(map(len, known)):
            continue
        compared = True
        for members, times in known.items():
            others = [of for other, of in known.items() if other != members]
            usual = float(np.median([np.median(of) for of in others]))
            # In most of its transfers, and against most of each other group's that is not slow itself.
            if np.quantile(times, 0.25) > _SLOWER * usual and np.median(times) > max(
                float(np.quantile(of, 0.75)) for of in others if np.median(of) <= _SLOWER * usual
            ):
                flagged.add(members)
    for members in flagged:
        slow.update(members)
    most = max(slow.values(), default=0)
    return (
        sorted(graph.ranks[position] for position, times in slow.items() if times == most)
        if compared
        else None
    )


def _alike(
    graph: Graph, hosts: Sequence[str]
) -> dict[tuple[str, float, int, int], dict[tuple[int, ...], list[float]]]:
    """(operation, bytes, ranks, hosts) → members → transfers, ns."""
    found: dict[tuple[str, float, int, int], dict[tuple[int, ...], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for group in graph.groups:
        for k, sync in enumerate(group.syncs):
            if sync.kind == SyncKind.BARRIER or len(sync.members) < 2:
                continue
            transfer = _transfer(group, k)
            spanned = len({hosts[position] for position in sync.members})
            for n in range(len(group.steps)):
                size = float(group.message_bytes[n, k])
                if size > 0:
                    operation = classify.communication_operation(sync.name) or sync.name
                    alike = (operation, size, len(sync.members), spanned)
                    found[alike][sync.members].append(float(transfer[n]))
    return found


def _transfer(group: CycleGroup, k: int) -> Array:
    """[N] ns from when all members were ready and their group's previous collective was over: what runs in other
    groups meanwhile is no queue for it."""
    sync = group.syncs[k]
    members = list(sync.members)
    ready = (group.arrival if group.ready is None else group.ready)[:, k, members].max(axis=1)
    before = [j for j, other in enumerate(group.syncs[:k]) if other.members == sync.members]
    if before:
        ready = np.maximum(ready, group.end[:, before[-1], members].max(axis=1))
    over: Array = np.clip(np.median(group.end[:, k, members], axis=1) - ready, 0, None)
    return over
