"""What-if: the step time of the same job with one thing changed.

Work and meetings are taken out of the measured graph by :mod:`.replay`; changes of the transfers are replayed
bucket by bucket (:mod:`.lanes`). A message takes ``latency + bytes / rate``; on a link *k* times faster,
``latency + (transfer - latency) / k``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ddpdoctor.measure.attribution import Attribution, component
from ddpdoctor.measure.facts import BucketFacts, WhatIfFacts
from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.replay import (
    Change,
    Part,
    length_ns,
    parts_of,
    replay_all,
    without_meeting,
    without_waiting,
    without_work,
)
from ddpdoctor.measure.taxonomy import WAITING_FOR_DATA, Component, SyncKind


def _mean(lengths: list[Array]) -> float | None:
    return float(np.concatenate(lengths).mean()) if lengths else None


def faster_link(graph: Graph, times: float, latency_ns: float) -> float | None:
    """Mean step, ns, on a link ``times`` as fast: each collective but barriers keeps its latency, and its other
    time is divided by ``times``. None where nothing was matched."""
    found = []
    for group in graph.groups:
        parts = parts_of(group)
        for k, sync in enumerate(group.syncs):
            if sync.kind != SyncKind.BARRIER:
                fixed = np.minimum(parts[k].transfer, latency_ns)
                parts[k] = replace(parts[k], transfer=fixed + (parts[k].transfer - fixed) / times)
        found.append(length_ns(group, parts))
    return _mean(found)


def perfect_overlap(graph: Graph) -> float | None:
    """Mean step, ns, if all transfer of gradients ran beside computation; the link is then busy for the sum of the
    transfers, and no step is shorter than that. None where no gradients are reduced."""
    if not any(sync.kind == SyncKind.GRADIENTS for group in graph.groups for sync in group.syncs):
        return None
    found = []
    for group in graph.groups:
        parts = parts_of(group)
        hidden = [replace(p, transfer=np.zeros_like(p.transfer)) if p.gradients else p for p in parts]
        busy = np.zeros_like(group.begin)
        for part in parts:
            busy[:, part.members] += part.transfer[:, None] * part.gradients
        found.append(np.maximum(length_ns(group, hidden), busy.max(axis=1)))
    return _mean(found)


def with_buckets(
    graph: Graph, bucket_bytes: float, latency_ns: float, bytes_per_ns: float, backward_ns: float
) -> float | None:
    """Mean step, ns, with gradients reduced in equal buckets of at most ``bucket_bytes``.

    A new bucket is ready when the gradients up to its end are: interpolated between the measured buckets, from no
    bytes at the beginning of the backward pass, ``backward_ns`` before its last bucket. None where sizes are not
    known.
    """
    found = []
    for group in graph.groups:
        parts = parts_of(group)
        chosen = [p for p in parts if p.gradients]
        if not chosen or any(np.isnan(p.message_bytes).any() for p in chosen):
            return None
        built: list[Part] = []
        runs = {p.run: [q for q in chosen if q.run == p.run] for p in chosen}
        for part in parts:
            if not part.gradients:
                built.append(part)
            elif part.holds:
                built += _cut(runs[part.run], bucket_bytes, latency_ns, bytes_per_ns, backward_ns)
        found.append(length_ns(group, built))
    return _mean(found)


def _cut(
    run: list[Part], bucket_bytes: float, latency_ns: float, bytes_per_ns: float, backward_ns: float
) -> list[Part]:
    """The reductions of one backward pass in equal buckets."""
    last = run[-1]
    sizes = np.stack([p.message_bytes for p in run])
    total = sizes.sum(axis=0)
    count = max(1, int(np.ceil(float(total.max()) / bucket_bytes)))
    known = np.concatenate((np.zeros((1, sizes.shape[1])), np.cumsum(sizes, axis=0) / total))
    ready = np.stack([last.ready - backward_ns, *(p.ready for p in run)])
    ready = np.maximum.accumulate(ready)
    transfer = latency_ns + total / count / bytes_per_ns
    buckets = []
    for bucket in range(count):
        share = (bucket + 1) / count
        at = np.array(
            [
                [np.interp(share, known[:, n], ready[:, n, m]) for m in range(len(last.members))]
                for n in range(sizes.shape[1])
            ]
        )
        final = bucket == count - 1
        stalls = last.stalls if final else np.zeros_like(last.stalls)
        buckets.append(replace(last, ready=at, transfer=transfer, holds=final, stalls=stalls))
    return buckets


def instant_data(graph: Graph) -> float | None:
    """Mean step, ns, if every batch were there when it is asked for. None where no rank waits for data."""
    return without_components(graph, WAITING_FOR_DATA)


def without_components(graph: Graph, names: Sequence[Component]) -> float | None:
    """Mean step, ns, if no rank spent time on these components of work; None where none does."""
    removed = [np.clip(part, 0, None) for part in component([g.work for g in graph.groups], names)]
    if not any(part.any() for part in removed):
        return None
    return float(replay_all(graph, [without_work(removed)]).mean())


def nobody_late(graph: Graph, found: Attribution) -> float | None:
    """Mean step, ns, if the accused ranks did no more than the others; None where nobody is accused."""
    removed = [amount.sum(axis=-1) for amount in found.excess]
    if not any(part.any() for part in removed):
        return None
    return float(replay_all(graph, [without_work(removed)]).mean())


def no_barriers(graph: Graph) -> float | None:
    """Mean step, ns, without explicit barriers: ranks go on and meet at the next collective. None without any."""
    if not any(sync.kind == SyncKind.BARRIER for group in graph.groups for sync in group.syncs):
        return None
    return float(replay_all(graph, without_waiting(graph, [SyncKind.BARRIER])).mean())


def reduced_again(group: CycleGroup, k: int) -> bool:
    """Whether the same gradients are reduced once more before the optimizer steps."""
    sync = group.syncs[k]
    return sync.kind == SyncKind.GRADIENTS and any(
        later.kind == SyncKind.GRADIENTS
        and (later.group, later.update) == (sync.group, sync.update)
        and later.micro > sync.micro
        for later in group.syncs[k + 1 :]
    )


def without_reductions(graph: Graph, synced_ns: Sequence[float] | None = None) -> list[Change]:
    """Takes out the reductions that are done again later in the step, with what they cost the training thread of each rank
    before its arrival: ``synced_ns`` by position, 0 where unknown (see :mod:`.reducer`)."""
    if synced_ns is None or not any(synced_ns):
        return [without_meeting(reduced_again)]
    own = np.array(synced_ns)
    removed = []
    for group in graph.groups:
        chosen = np.array([reduced_again(group, k) for k in range(len(group.syncs))])
        backward = np.clip(component([group.work], (Component.BACKWARD,))[0], 0, None)
        removed.append(np.minimum(backward, own) * chosen[None, :, None])
    return [without_meeting(reduced_again), without_work(removed)]


def no_sync(graph: Graph, synced_ns: Sequence[float] | None = None) -> float | None:
    """Mean step, ns, if only the last micro-batch's gradients were reduced (DDP's ``no_sync``). None where that is
    so already. ``synced_ns`` as in :func:`without_reductions`."""
    if not any(reduced_again(group, k) for group in graph.groups for k in range(len(group.syncs))):
        return None
    return float(replay_all(graph, without_reductions(graph, synced_ns)).mean())


_LATENCY_FROM_BYTES = 1 << 20
"""Of messages that all have about one size, latency and bytes cannot be told apart; from this size on, bytes are
what takes time."""


def what_if_facts(
    graph: Graph,
    found: Attribution,
    window_graph: Graph | None,
    buckets: BucketFacts,
    latency_us: float | None,
    rate: float | None,
    synced_ns: Sequence[float] | None = None,
) -> WhatIfFacts:
    """All scenarios. ``graph`` is the one that speaks for the job; the transfers of single buckets are known in
    ``window_graph`` only, whose gains are taken as shares. ``latency_us`` and ``rate`` (bytes per ns) are those
    of its messages; ``synced_ns`` as in :func:`without_reductions`."""
    if not graph.groups:
        return WhatIfFacts()
    link = overlap = favoured = None
    if window_graph is not None and window_graph.matched and window_graph.groups:
        scale = graph.mean_cycle_ns / window_graph.mean_cycle_ns
        latency_ns = _latency_ns(window_graph, latency_us, rate)
        overlap = _scaled(perfect_overlap(window_graph), scale)
        if latency_ns is not None:
            link = _scaled(faster_link(window_graph, 2.0, latency_ns), scale)
        if latency_ns is not None and rate is not None and buckets.favoured_cap_bytes and buckets.backward_ms:
            other = (buckets.favoured_cap_bytes, latency_ns, rate, buckets.backward_ms * 1e6)
            favoured = _scaled(with_buckets(window_graph, *other), scale)
    return WhatIfFacts(
        nobody_late_ms=_scaled(nobody_late(graph, found)),
        instant_data_ms=_scaled(instant_data(graph)),
        no_barriers_ms=_scaled(no_barriers(graph)),
        no_sync_ms=_scaled(no_sync(graph, synced_ns)),
        perfect_overlap_ms=overlap,
        link_twice_as_fast_ms=link,
        favoured_buckets_ms=favoured,
    )


def _scaled(step_ns: float | None, scale: float = 1.0) -> float | None:
    """ms"""
    return None if step_ns is None else step_ns * scale / 1e6


def _latency_ns(graph: Graph, latency_us: float | None, rate: float | None) -> float | None:
    if latency_us is None or rate is not None:
        return None if latency_us is None else latency_us * 1e3
    sizes = [
        g.message_bytes[:, k]
        for g in graph.groups
        for k, sync in enumerate(g.syncs)
        if sync.kind == SyncKind.GRADIENTS
    ]
    return 0.0 if sizes and np.median(np.concatenate(sizes)) >= _LATENCY_FROM_BYTES else None
