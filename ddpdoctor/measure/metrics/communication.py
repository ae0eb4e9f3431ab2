"""Facts about collectives: waiting and transfer, overlap, bytes, bandwidth, slow links.

Bandwidth is that of the transfer alone, without waiting for the last rank, by the formulas of nccl-tests.

Algorithm bandwidth is size / time. Bus bandwidth multiplies it by a factor that makes it comparable between
operations and rank counts (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): allreduce 2
(n - 1) / n, allgather, reduce-scatter and alltoall (n - 1) / n, broadcast and reduce 1. GB are 10^9 bytes.

A link is slow if its process group takes longer for the same transfer than other groups. All members of a collective end together, so
one group alone does not show which of its links is slow. Transfers are compared between process groups that reduce the same number of
bytes with as many ranks on as many hosts, as tensor-parallel groups do. If sizes were not recorded, the n-th collectives of groups with as
many collectives per cycle are compared, if the groups' ranks compute for equally long: replicas of one model exchange the same data.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from ddpdoctor.measure.facts import CommunicationFacts
from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.numerics import (
    Array,
    Intervals,
    Mask,
    clip,
    intersect,
    nan_median,
    subtract,
    total,
    union,
)
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.summary import BandwidthPoint
from ddpdoctor.measure.taxonomy import DEVICE_COMPUTATION, INDEX, SyncKind
from ddpdoctor.measure.window import UNKNOWN_STEP, Window, step_of_collectives
from ddpdoctor.trace import classify

from .steps import splits

_TRANSFERRING = (SyncKind.GRADIENTS, SyncKind.COLLECTIVE, SyncKind.BROADCAST, SyncKind.MODEL)
"""Synchronisations that send bytes; barriers are a separate part of the breakdown."""
_SHARDED = ("allgather", "reducescatter")
"""Operations that send sharded parameters and gradients (FSDP, ZeRO)."""


def communication_facts(
    graph: Graph,
    window_graph: Graph | None,
    logs: Sequence[RankLog],
    windows: Sequence[Window],
    latency_us: float | None,
) -> CommunicationFacts:
    """Return the facts about collectives from ``graph`` (the primary one) and from the windows.

    Single collectives, their bytes and their bandwidth come from the window. If the step logs are primary, wait and transfer come from
    them, over the whole run. ``latency_us`` is the result of :func:`message_cost`.
    """
    shown = graph if window_graph is None else window_graph
    use_logs = graph is not window_graph and graph.matched > 0
    matched = graph if use_logs else shown
    wait_ms, exposed_ms, _ = wait_and_transfer_ms(matched)
    total_ms = wait_and_transfer_ms(shown)[2]
    # If the window's total transfer is less than the run's exposed transfer, the window does not show how much is hidden.
    window_shows_hidden = not (use_logs and total_ms is not None and total_ms < (exposed_ms or 0.0))
    hosts = [rank.host for rank in (logs if window_graph is None else windows)]
    median_bus, best_bus = large_bus_gb_per_s(bandwidth_points(shown, hosts))
    bytes_per_step = _bytes_per_step(windows)
    if use_logs and not bytes_per_step:
        # From the sizes in the step logs, if any is known.
        sums = [float(np.nansum(group.message_bytes)) for group in graph.groups]
        bytes_per_step = sum(sums) / max(graph.cycles, 1) or None
    counts = [in_marked_steps(window).sum() for window in windows]
    operations, operation_bytes = _by_operation(windows)
    # If the window's collectives were matched, links are compared there: it has more collectives than the step logs.
    compared = shown if shown is window_graph and shown.matched else graph
    compared_hosts = [rank.host for rank in (windows if compared is window_graph else logs)]
    return CommunicationFacts(
        wait_ms=wait_ms,
        transfer_ms=exposed_ms,
        total_transfer_ms=total_ms if window_shows_hidden else None,
        exposed_ms=_exposed_ms(windows),
        hidden_share=_hidden_share(windows) if window_shows_hidden else None,
        bytes_per_step=bytes_per_step,
        sharded_share=_sharded_share(windows),
        collectives_per_step=float(np.median(counts)) / marked_steps(windows) if counts else None,
        operations_per_step=operations or None,
        operation_bytes_per_step=operation_bytes or None,
        bus_gb_per_s=median_bus,
        best_bus_gb_per_s=best_bus,
        latency_us=latency_us,
        matched=matched.matched,
        unmatched=matched.unmatched,
        ranks_meet=graph.ranks_meet if graph.groups else None,
        clock_error_us=shown.clock_error_ns / 1e3 if shown.clock_error_ns is not None else None,
        slow_link_ranks=slow_link_ranks(compared, compared_hosts),
    )


def wait_and_transfer_ms(graph: Graph) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return exposed wait, exposed transfer and total transfer in collectives (without barriers), in ms per step, means over ranks and
    cycles; None if no collectives were matched."""
    if not (graph.matched and graph.groups):
        return None, None, None
    sums_ns = np.zeros(3)
    for group in graph.groups:
        for sync, split in zip(group.syncs, splits(group), strict=True):
            if sync.kind in _TRANSFERRING:
                transfer = split.transfer.sum()
                sums_ns += split.wait.sum(), transfer, transfer + split.hidden_transfer.sum()
    wait_ms, exposed_ms, total_ms = (sums_ns / (len(graph.ranks) * graph.cycles * 1e6)).tolist()
    return wait_ms, exposed_ms, total_ms


def _hidden_share(windows: Sequence[Window]) -> float | None:
    """Time in both communication and computation / time in communication, median rank (HolisticTraceAnalysis's overlap)."""
    shares = []
    for window in windows:
        in_collectives = communicating(window)
        if whole := total(in_collectives):
            shares.append(total(intersect(in_collectives, window.compute)) / whole)
    return float(np.median(shares)) if shares else None


def _exposed_ms(windows: Sequence[Window]) -> float | None:
    """Exposed communication in the marked steps, ms per step, median rank."""
    per_step_ns = []
    for window in windows:
        if not len(window.collectives):
            continue
        exposed = subtract(communicating(window), window.compute)
        if window.steps:
            exposed = clip(exposed, window.steps[0][1], window.steps[-1][2])
        per_step_ns.append(total(exposed) / max(len(window.steps), 1))
    return float(np.median(per_step_ns)) / 1e6 if per_step_ns else None


def _bytes_per_step(windows: Sequence[Window]) -> float | None:
    """Bytes of the collectives in the marked steps, per step, median of the ranks with known message sizes."""
    sums = [
        float(np.nansum(window.collectives.bytes[in_marked_steps(window)]))
        for window in windows
        if len(window.collectives) and not np.isnan(window.collectives.bytes).all()
    ]
    return float(np.median(sums)) / marked_steps(windows) if sums else None


def _by_operation(windows: Sequence[Window]) -> tuple[dict[str, float], dict[str, float]]:
    """Collectives per step and bytes per step, both by operation, in the marked steps of the median rank. The bytes only contain
    operations with known sizes."""
    counts: dict[str, list[float]] = defaultdict(list)
    sizes: dict[str, list[float]] = defaultdict(list)
    for window in windows:
        inside = in_marked_steps(window)
        operations = np.array(window.collectives.operation, str)[inside]
        own_bytes = window.collectives.bytes[inside]
        for operation in np.unique(operations).tolist():
            own = operations == operation
            counts[operation].append(float(own.sum()))
            if not np.isnan(own_bytes[own]).any():
                sizes[operation].append(float(own_bytes[own].sum()))
    steps = marked_steps(windows)
    per_step = {operation: float(np.median(each)) / steps for operation, each in counts.items()}
    ordered = dict(sorted(per_step.items(), key=lambda item: -item[1]))
    return ordered, {name: float(np.median(sizes[name])) / steps for name in ordered if name in sizes}


def _sharded_share(windows: Sequence[Window]) -> float | None:
    """Share of sharding operations in the time of collectives that send gradients or parameters."""
    whole = sharded = 0.0
    for comms in (window.collectives for window in windows):
        spent = (comms.end - comms.start) * np.isin(comms.kind, (SyncKind.GRADIENTS, SyncKind.MODEL))
        whole, sharded = whole + spent.sum(), sharded + spent[np.isin(comms.operation, _SHARDED)].sum()
    return float(sharded / whole) if whole else None


def marked_steps(windows: Sequence[Window]) -> float:
    """Return the number of steps that a window marks, median over the windows that mark any; 1.0 if none does."""
    marked = [len(window.steps) for window in windows if window.steps]
    return float(np.median(marked)) if marked else 1.0


def in_marked_steps(window: Window) -> Mask:
    """Return [M] whether the host launched each collective in a marked step; all True if no step is marked."""
    inside: Mask = step_of_collectives(window) != UNKNOWN_STEP
    return inside


def communicating(window: Window) -> Intervals:
    """Return the intervals in which the rank is in any collective."""
    return union(window.collectives.start, window.collectives.end)


_FEWEST_MESSAGES = 3
"""Fewest messages for a fitted line, as two points always fit one, and for a reference."""


class MessageCost(msgspec.Struct, frozen=True):
    """Time of a message: ``latency_us`` + bytes / ``bytes_per_ns``. None if unknown."""

    latency_us: float | None = None
    bytes_per_ns: float | None = None


def message_cost(graph: Graph, hosts: Sequence[str]) -> MessageCost:
    """Fit the cost of a message to all reductions in the kind of process group (ranks, hosts) that reduces the gradients; ``hosts`` by
    position."""
    reductions = [of for of in transfers(graph, hosts) if of.operation == "allreduce"]
    gradients_ns = [of.ns if of.kind == SyncKind.GRADIENTS else 0.0 for of in reductions]
    reductions = of_longest_kind(reductions, gradients_ns)
    if len(reductions) < _FEWEST_MESSAGES:
        return MessageCost()
    latency_ns, rate = latency_and_rate(
        np.array([transfer.bytes for transfer in reductions]),
        np.array([transfer.ns for transfer in reductions]),
    )
    return MessageCost(latency_ns / 1e3, rate)


class Tuning(msgspec.Struct, frozen=True):
    """How a line is fitted to messages of several sizes."""

    least_class_share: float = 0.05
    """Least share of all messages for a size class to count. Disturbances change the median of fewer messages."""
    least_size_ratio: float = 2.0
    """Least ratio of the largest to the smallest size class. Transfers of closer sizes differ by less than their scatter."""


_TUNING = Tuning()
_LARGE_BYTES = 1 << 20
"""From 1 MiB on, messages are bound by bandwidth rather than latency (msprof-analyze calls smaller ones "small packets")."""


class Transfer(NamedTuple):
    """The transfer of one collective of known size, from the release of its members to its end."""

    operation: str
    bytes: float
    ns: float
    kind: str
    ranks: int
    """Ranks in its process group."""
    hosts: int
    """Hosts of its recorded ranks."""


_Of = TypeVar("_Of", Transfer, BandwidthPoint)


def bus_factor(operation: str, ranks: int) -> float:
    """Return bus bandwidth / algorithm bandwidth."""
    if ranks < 2:
        return 1.0
    if operation == "allreduce":
        return 2.0 * (ranks - 1) / ranks
    if operation in ("allgather", "reducescatter", "alltoall"):
        return (ranks - 1) / ranks
    return 1.0


def transfers(graph: Graph, hosts: Sequence[str]) -> list[Transfer]:
    """Return the transfers of known size that take any time; ``hosts`` by position."""
    known = []
    for group in graph.groups:
        from_root = nan_median(group.end - group.released, axis=2)
        for k, sync in enumerate(group.syncs):
            operation = classify.communication_operation(sync.name) or sync.name
            ranks = max(sync.size, len(sync.members))
            spanned = len({hosts[position] for position in sync.members})
            sizes = group.message_bytes[:, k]
            times_ns = (group.transfer if sync.root is None else from_root)[:, k]
            usable = (sizes > 0) & (times_ns > 0)
            pairs = zip(sizes[usable].tolist(), times_ns[usable].tolist(), strict=True)
            known += [Transfer(operation, size, ns, sync.kind, ranks, spanned) for size, ns in pairs]
    return known


def bandwidth_points(graph: Graph, hosts: Sequence[str]) -> list[BandwidthPoint]:
    """Return median transfer and bus bandwidth by operation, by ranks and hosts of the process group, and by power of two of bytes. Groups
    within a host and between hosts use different links."""
    classes: dict[tuple[str, int, int, int], list[Transfer]] = defaultdict(list)
    for of in transfers(graph, hosts):
        classes[of.operation, of.ranks, of.hosts, int(np.log2(of.bytes))].append(of)
    return [_point(same_class) for _, same_class in sorted(classes.items())]


def _point(same_class: list[Transfer]) -> BandwidthPoint:
    first = same_class[0]
    size = float(np.median([transfer.bytes for transfer in same_class]))
    taken_ns = float(np.median([transfer.ns for transfer in same_class]))
    return BandwidthPoint(
        operation=first.operation,
        ranks=first.ranks,
        hosts=first.hosts,
        bytes=size,
        count=len(same_class),
        transfer_ms=taken_ns / 1e6,
        bus_gb_per_s=size / taken_ns * bus_factor(first.operation, first.ranks),
    )


def of_longest_kind(of_groups: Sequence[_Of], spent: Sequence[float]) -> list[_Of]:
    """Return the transfers or points of the kind of process group (ranks, hosts) in which most time is ``spent``."""
    sums: dict[tuple[int, int], float] = defaultdict(float)
    for of, time in zip(of_groups, spent, strict=True):
        sums[of.ranks, of.hosts] += time
    longest = max(sums, key=lambda kind: sums[kind], default=None)
    return [of for of in of_groups if (of.ranks, of.hosts) == longest]


def latency_and_rate(sizes: Array, times_ns: Array) -> tuple[float, float | None]:
    """Return (ns per message, bytes per ns) of a robust fit of time = latency + bytes / rate.

    Fits medians per size class (a power of two), weighted by their relative error, because scatter is proportional to the transfer time.
    Classes with few messages are excluded: one disturbed message would tilt the line. If all messages have about the same size, the
    latency is the median time, an upper bound, and the rate is None.
    """
    classes = np.round(np.log2(np.maximum(sizes, 1.0)))
    every = [classes == size_class for size_class in np.unique(classes)]
    chosen = [rows for rows in every if rows.sum() >= _TUNING.least_class_share * len(sizes)] or every
    x = np.array([np.median(sizes[rows]) for rows in chosen])
    y = np.array([np.median(times_ns[rows]) for rows in chosen])
    if x.max() < _TUNING.least_size_ratio * x.min():
        return float(np.median(times_ns)), None
    weight = np.array([np.sqrt(rows.sum()) for rows in chosen]) / y
    (latency, slope), *_ = np.linalg.lstsq(np.stack([weight, weight * x], axis=1), weight * y, rcond=None)
    if latency < 0:
        latency, slope = 0.0, float((weight**2 * x * y).sum() / (weight**2 * x * x).sum())
    if slope <= 0:
        return float(np.median(times_ns)), None
    return float(latency), 1.0 / float(slope)


def large_bus_gb_per_s(points: list[BandwidthPoint]) -> tuple[float | None, float | None]:
    """Return the bus bandwidth of the size class of at least 1 MiB with the longest total transfer, and the best bandwidth of classes of at
    most its size, both in the kind of process group (ranks, hosts) with the longest total transfer. Larger messages are no reference,
    because on fast links bandwidth still grows far beyond 1 MiB; nor are classes of fewer than ``_FEWEST_MESSAGES``, of which one that met
    no disturbance is the median."""
    points = of_longest_kind(points, [point.count * point.transfer_ms for point in points])
    large = [point for point in points if point.bytes >= _LARGE_BYTES]
    longest = max(large, key=lambda point: point.count * point.transfer_ms, default=None)
    most_bytes = math.inf if longest is None else longest.bytes
    references = [point for point in points if point.bytes <= most_bytes and point.count >= _FEWEST_MESSAGES]
    best = max((point.bus_gb_per_s for point in references), default=None)
    return (None if longest is None else longest.bus_gb_per_s), best


Members = tuple[int, ...]
"""Positions of a process group's ranks."""
Place = tuple[int, int]
"""(n, count): the n-th of its group's collectives in a cycle."""
TransferKind = tuple[str, float | Place, int, int]
"""Operation, bytes (or the place, if these are unknown), ranks, hosts. Groups for which all four are equal make the same transfer."""


class LinkTuning(msgspec.Struct, frozen=True):
    """When a group's transfers are slower than those of corresponding groups."""

    slow_ratio: float = 1.5
    """Multiple of the other groups' median transfer. Links of one kind differ by a few per cent, a link that was negotiated at half
    its width or rate by a factor of two."""
    fewest_transfers: int = 3
    """Fewest transfers of a group in a size class, or in all smaller classes together. An outlier among two would be half of the median."""
    slow_place_share: float = 0.5
    """Share of the places at which a group without known sizes must be slower."""
    compute_ratio: float = 1.1
    """Largest ratio of computation times of groups that compute the same. Throttled devices and other stages of a model differ by more."""
    quantile: float = 0.25
    """The lower quantile of a group's transfers must exceed ``slow_ratio`` times the others' median, and the group's median must exceed the
    upper quantile of each normal group."""


_LINKS = LinkTuning()


def slow_link_ranks(graph: Graph, hosts: Sequence[str]) -> list[int] | None:
    """Return the ranks (numbers) of groups whose transfers are persistently slower than those of comparable groups; ``hosts`` by position.
    If ranks are in several slow groups (such as in both dimensions of a mesh), only the ranks in the most of them are returned. Empty if
    no group is slower; None if no groups are comparable."""
    member_sets = {sync.members for group in graph.groups for sync in group.syncs if len(sync.members) > 1}
    if len(member_sets) < 2:
        return None
    compared = False
    slow_groups: set[Members] = set()
    places, slow_places = Counter[Members](), Counter[Members]()
    computed_ns = _computed_ns(graph)
    for (_, size, _, _), groups in _pooled(_transfers_by_kind(graph, hosts)).items():
        known = {
            members: np.array(ns) for members, ns in groups.items() if len(ns) >= _LINKS.fewest_transfers
        }
        # Skip groups with a common rank: they may share its link.
        if len(known) < 2 or len(set().union(*known)) < sum(map(len, known)):
            continue
        computed = [float(np.median(computed_ns[list(members)])) for members in known]
        replicas = 0 < max(computed) <= _LINKS.compute_ratio * min(computed)
        if isinstance(size, tuple) and not replicas:
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
    # A slow link slows down all transfers over it. At a single place a group may send other messages, which is not visible without sizes.
    slow_groups.update(
        of for of, count in slow_places.items() if count > _LINKS.slow_place_share * places[of]
    )
    times_slow = Counter(position for members in slow_groups for position in members)
    most = max(times_slow.values(), default=0)
    return sorted(graph.ranks[position] for position, times in times_slow.items() if times == most)


def _pooled(
    classes: Mapping[TransferKind, Mapping[Members, list[float]]],
) -> dict[TransferKind, dict[Members, list[float]]]:
    """The classes of transfers, of which those with too few transfers per group are pooled: in a window of two steps each size occurs
    twice. Pooled transfers are relative to the median group of their class."""
    enough: dict[TransferKind, dict[Members, list[float]]] = {}
    pooled: dict[TransferKind, dict[Members, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (operation, size, ranks, hosts), groups in classes.items():
        usual_ns = float(np.median([np.median(ns) for ns in groups.values()]))
        if max(map(len, groups.values())) >= _LINKS.fewest_transfers or len(groups) < 2 or usual_ns <= 0:
            enough[operation, size, ranks, hosts] = dict(groups)
            continue
        any_size = (-1, -1) if isinstance(size, tuple) else -1.0
        for members, ns in groups.items():
            pooled[operation, any_size, ranks, hosts][members] += [each / usual_ns for each in ns]
    return enough | pooled


def _computed_ns(graph: Graph) -> Array:
    """[R] ns that each rank computes in the median cycle, including computation that overlaps with collectives."""
    columns = [INDEX[component] for component in DEVICE_COMPUTATION]
    per_cycle = [group.work[..., columns].sum(axis=(1, 3)) for group in graph.groups]
    for own, group in zip(per_cycle, graph.groups, strict=True):
        own += 0.0 if group.hidden is None else group.hidden[..., columns].sum(axis=(1, 3))
    usual: Array = np.median(np.concatenate(per_cycle), axis=0)
    return usual


def _slower_than_others(groups: Mapping[Members, Array]) -> Iterator[Members]:
    """Groups that are slower than the others in most of their transfers, and than most transfers of each group that is not slow."""
    for members, own_ns in groups.items():
        others = [other_ns for other, other_ns in groups.items() if other != members]
        slow_ns = _LINKS.slow_ratio * float(np.median([np.median(other_ns) for other_ns in others]))
        if np.quantile(own_ns, _LINKS.quantile) <= slow_ns:
            continue
        usual = [other_ns for other_ns in others if np.median(other_ns) <= slow_ns]
        if np.median(own_ns) > max(float(np.quantile(other_ns, 1 - _LINKS.quantile)) for other_ns in usual):
            yield members


def _transfers_by_kind(graph: Graph, hosts: Sequence[str]) -> dict[TransferKind, dict[Members, list[float]]]:
    """Transfer times in ns of each process group, by kind of transfer."""
    by_kind: dict[TransferKind, dict[Members, list[float]]] = defaultdict(lambda: defaultdict(list))
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
                    by_kind[same][sync.members].append(float(transfer_ns[n]))
    return by_kind


def _transfer(group: CycleGroup, k: int, before: int | None) -> Array:
    """[N] ns of the transfer: from when all members were ready (on a device, had started) and the previous collective of their group,
    ``before``, was over. Collectives of other groups do not delay it."""
    sync = group.syncs[k]
    members = list(sync.members)
    own = group.arrival if group.on_device else group.ready
    ready = own[:, k, members].max(axis=1)
    if before is not None:
        ready = np.maximum(ready, group.end[:, before, members].max(axis=1))
    taken: Array = np.clip(np.median(group.end[:, k, members], axis=1) - ready, 0, None)
    return taken
