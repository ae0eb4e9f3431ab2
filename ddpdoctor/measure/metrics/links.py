"""Find ranks with slow links, where several groups make the same transfer.

All members of a collective end together, so one group alone does not show which of its links is slow. Transfers are compared where
several process groups reduce the same number of bytes with as many ranks on as many hosts, as tensor-parallel groups do. Without
recorded sizes, collectives at the same place among as many of a group's are compared, for groups whose ranks compute as much: replicas
of one model exchange the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.taxonomy import DEVICE_COMPUTATION, INDEX, SyncKind
from ddpdoctor.trace import classify

Members = tuple[int, ...]
"""Positions of a process group's ranks."""
Place = tuple[int, int]
"""(which of its group's collectives in a cycle, of how many)"""
Alike = tuple[str, float | Place, int, int]
"""Operation, bytes (or the place, where these are unknown), ranks, hosts: groups with the same of all four make the same transfer."""


class Tuning(msgspec.Struct, frozen=True):
    """When a group's transfers are slower than those of corresponding groups."""

    slower: float = 1.5
    """Multiple of the other groups' median transfer: links of one kind differ by a few per cent, one that trained at half its width or
    rate by a factor of two."""
    fewest: int = 3
    """Fewest transfers of a group in a size class: of two, one may be an accident and is half of the median."""
    mostly: float = 0.5
    """Share of the places at which a group without known sizes must be slower."""
    as_much: float = 1.1
    """Ratio of the ranks' computation up to which two groups compute the same: throttled devices and other stages of a model differ by
    more."""
    quantile: float = 0.25
    """Quantile: the group's quickest quarter must also be slower than each other group's slowest quarter."""


_TUNING = Tuning()


def slow_link_ranks(graph: Graph, hosts: Sequence[str]) -> list[int] | None:
    """Ranks (numbers) of groups whose transfers are persistently slower than those of corresponding groups; ``hosts`` by position. If
    ranks are in slow groups of several kinds (such as both dimensions of a mesh), only those in the most. Empty where there are
    corresponding groups and none is slower; None where groups cannot be compared."""
    several = {sync.members for group in graph.groups for sync in group.syncs if len(sync.members) > 1}
    if len(several) < 2:
        return None
    compared = False
    slow_groups: set[Members] = set()
    places, slow_places = Counter[Members](), Counter[Members]()
    computed_ns = _computed_ns(graph)
    for (_, size, _, _), groups in _transfers_of_like_groups(graph, hosts).items():
        known = {members: np.array(ns) for members, ns in groups.items() if len(ns) >= _TUNING.fewest}
        if len(known) < 2 or _overlap(known):
            continue
        if isinstance(size, tuple) and not _replicas(known, computed_ns):
            continue
        compared = True
        slow = list(_slower_than_others(known))
        if isinstance(size, tuple):
            places.update(known.keys())
            slow_places.update(slow)
        else:
            slow_groups.update(slow)
    if not compared:
        return None
    # A slow link slows all transfers over it; a single place may have other messages, which no size shows.
    slow_groups.update(of for of, slower in slow_places.items() if slower > _TUNING.mostly * places[of])
    times_slow = Counter(position for members in slow_groups for position in members)
    most = max(times_slow.values(), default=0)
    return sorted(graph.ranks[position] for position, times in times_slow.items() if times == most)


def _overlap(groups: Mapping[Members, Array]) -> bool:
    """Whether a rank is in several of the groups, which then may share its link."""
    return len(set().union(*groups)) < sum(map(len, groups))


def _computed_ns(graph: Graph) -> Array:
    """[R] ns that each rank computes in a median cycle, overlapped with collectives or not; zeros without cycles."""
    if not graph.groups:
        return np.zeros(len(graph.ranks))
    columns = [INDEX[component] for component in DEVICE_COMPUTATION]
    per_cycle = [
        (of if group.hidden is None else of + group.hidden[..., columns].sum(axis=(1, 3)))
        for group, of in ((group, group.work[..., columns].sum(axis=(1, 3))) for group in graph.groups)
    ]
    usual: Array = np.median(np.concatenate(per_cycle), axis=0)
    return usual


def _replicas(groups: Iterable[Members], computed_ns: Array) -> bool:
    """Whether the ranks of all these groups compute as much."""
    of_groups = [float(np.median(computed_ns[list(members)])) for members in groups]
    return 0 < max(of_groups) <= _TUNING.as_much * min(of_groups)


def _slower_than_others(groups: Mapping[Members, Array]) -> Iterator[Members]:
    """Groups that are slow in most of their transfers, and against most of each other group's that is not slow itself."""
    for members, own_ns in groups.items():
        others = [other_ns for other, other_ns in groups.items() if other != members]
        slow_ns = _TUNING.slower * float(np.median([np.median(other_ns) for other_ns in others]))
        if np.quantile(own_ns, _TUNING.quantile) <= slow_ns:
            continue
        usual = [other_ns for other_ns in others if np.median(other_ns) <= slow_ns]
        if np.median(own_ns) > max(float(np.quantile(other_ns, 1 - _TUNING.quantile)) for other_ns in usual):
            yield members


def _transfers_of_like_groups(graph: Graph, hosts: Sequence[str]) -> dict[Alike, dict[Members, list[float]]]:
    """Transfers of each group, ns, among the groups that make the same transfer."""
    alike: dict[Alike, dict[Members, list[float]]] = defaultdict(lambda: defaultdict(list))
    for group in graph.groups:
        places: dict[Members, list[int]] = defaultdict(list)
        for k, sync in enumerate(group.syncs):
            places[sync.members].append(k)
        numbers = dict.fromkeys(places, -1)
        for k, sync in enumerate(group.syncs):
            number = numbers[sync.members] = numbers[sync.members] + 1
            if sync.kind == SyncKind.BARRIER or len(sync.members) < 2:
                continue
            operation = classify.communication_operation(sync.name) or sync.name
            own = places[sync.members]
            transfer_ns = _transfer(group, k, own[number - 1] if number else None)
            spanned = len({hosts[position] for position in sync.members})
            place = (number, len(own))
            for n, size in enumerate(group.message_bytes[:, k].tolist()):
                if size != 0:
                    same = (operation, size if size > 0 else place, len(sync.members), spanned)
                    alike[same][sync.members].append(float(transfer_ns[n]))
    return alike


def _transfer(group: CycleGroup, k: int, before: int | None) -> Array:
    """[N] ns from when all members were ready (on a device, had started) and their group's previous collective, ``before``, was
    over: what runs in other groups meanwhile is no queue for it."""
    sync = group.syncs[k]
    members = list(sync.members)
    own = group.arrival if group.on_device or group.ready is None else group.ready
    ready = own[:, k, members].max(axis=1)
    if before is not None:
        ready = np.maximum(ready, group.end[:, before, members].max(axis=1))
    taken: Array = np.clip(np.median(group.end[:, k, members], axis=1) - ready, 0, None)
    return taken
