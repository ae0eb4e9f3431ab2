"""What-if: the step time of the same job with one thing changed.

Work and synchronisations are taken out of the measured graph by ``replay``; changes of the transfers are replayed
bucket by bucket (its lanes). A message takes ``latency + bytes / rate``; on a link *k* times faster,
``latency + (transfer - latency) / k``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.attribution import Attribution, component
from ddpdoctor.measure.facts import WhatIfFacts
from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.replay import (
    Change,
    Transmission,
    length_ns,
    replay_all,
    transmissions_of,
    without_sync,
    without_waiting,
    without_work,
)
from ddpdoctor.measure.taxonomy import WAITING_FOR_DATA, Component, SyncKind

from .context import Context, MessageCost

_LATENCY_FROM_BYTES = 1 << 20
"""Of messages that all have about one size, latency and bytes cannot be told apart; from this size on, bytes are
what takes time."""
_TWICE = 2.0
"""How much faster a link is in the scenario of that name."""


def _mean(lengths: list[Array]) -> float | None:
    return float(np.concatenate(lengths).mean()) if lengths else None


def faster_link(graph: Graph, times: float, latency_ns: float) -> float | None:
    """Mean step, ns, on a link ``times`` as fast: each collective but barriers keeps its latency, and its other
    time is divided by ``times``. None where nothing was matched."""
    lengths = []
    for group in graph.groups:
        parts = transmissions_of(group)
        for k, sync in enumerate(group.syncs):
            if sync.kind != SyncKind.BARRIER:
                fixed = np.minimum(parts[k].transfer, latency_ns)
                parts[k] = replace(parts[k], transfer=fixed + (parts[k].transfer - fixed) / times)
        lengths.append(length_ns(group, parts))
    return _mean(lengths)


def perfect_overlap(graph: Graph) -> float | None:
    """Mean step, ns, if all transfer of gradients ran beside computation; the link is then busy for the sum of the
    transfers, and no step is shorter than that. None where no gradients are reduced."""
    if not any(sync.kind == SyncKind.GRADIENTS for group in graph.groups for sync in group.syncs):
        return None
    lengths = []
    for group in graph.groups:
        parts = transmissions_of(group)
        hidden = [replace(p, transfer=np.zeros_like(p.transfer)) if p.gradients else p for p in parts]
        busy = np.zeros_like(group.begin)
        for part in parts:
            busy[:, part.members] += part.transfer[:, None] * part.gradients
        lengths.append(np.maximum(length_ns(group, hidden), busy.max(axis=1)))
    return _mean(lengths)


def with_buckets(
    graph: Graph, bucket_bytes: float, latency_ns: float, bytes_per_ns: float, backward_ns: float
) -> float | None:
    """Mean step, ns, with gradients reduced in equal buckets of at most ``bucket_bytes``.

    A new bucket is ready when the gradients up to its end are: interpolated between the measured buckets, from no
    bytes at the beginning of the backward pass, ``backward_ns`` before its last bucket. None where sizes are not
    known.
    """
    lengths = []
    for group in graph.groups:
        parts = transmissions_of(group)
        chosen = [p for p in parts if p.gradients]
        if not chosen or any(np.isnan(p.message_bytes).any() for p in chosen):
            return None
        built: list[Transmission] = []
        runs = {p.run: [q for q in chosen if q.run == p.run] for p in chosen}
        for part in parts:
            if not part.gradients:
                built.append(part)
            elif part.holds:
                built += _cut(runs[part.run], bucket_bytes, latency_ns, bytes_per_ns, backward_ns)
        lengths.append(length_ns(group, built))
    return _mean(lengths)


def _cut(
    run: list[Transmission], bucket_bytes: float, latency_ns: float, bytes_per_ns: float, backward_ns: float
) -> list[Transmission]:
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
        dependent = last.dependent if final else np.zeros_like(last.dependent)
        behind = last.behind if final else np.full_like(last.behind, -1)
        buckets.append(
            replace(last, ready=at, transfer=transfer, holds=final, dependent=dependent, behind=behind)
        )
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


def nobody_late(graph: Graph, attribution: Attribution) -> float | None:
    """Mean step, ns, if the accused ranks did no more than the others; None where nobody is accused."""
    removed = [amount.sum(axis=-1) for amount in attribution.excess]
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


def without_reductions(graph: Graph, synced_ns: Sequence[float] = ()) -> list[Change]:
    """Takes out the reductions that are done again later in the step, with what they cost the training thread of each rank
    before its arrival: ``synced_ns`` by position, 0 where unknown, see :class:`~.context.ReducerCosts`."""
    if not any(synced_ns):
        return [without_sync(reduced_again)]
    own = np.array(synced_ns)
    removed = []
    for group in graph.groups:
        chosen = np.array([reduced_again(group, k) for k in range(len(group.syncs))])
        backward = np.clip(component([group.work], [Component.BACKWARD])[0], 0, None)
        removed.append(np.minimum(backward, own) * chosen[None, :, None])
    return [without_sync(reduced_again), without_work(removed)]


def no_sync(graph: Graph, synced_ns: Sequence[float] = ()) -> float | None:
    """Mean step, ns, if only the last micro-batch's gradients were reduced (DDP's ``no_sync``). None where that is
    so already. ``synced_ns`` as in :func:`without_reductions`."""
    if not any(reduced_again(group, k) for group in graph.groups for k in range(len(group.syncs))):
        return None
    return float(replay_all(graph, without_reductions(graph, synced_ns)).mean())


def what_if_facts(
    context: Context, window_graph: Graph | None, favoured_cap_bytes: float | None
) -> WhatIfFacts:
    """All scenarios. The transfers of single buckets are known in ``window_graph`` only, whose gains are taken as shares of
    the step as the graph that speaks has it."""
    graph = context.graph
    if not graph.groups:
        return WhatIfFacts()
    link_ns = overlap_ns = favoured_ns = None
    scale = 1.0
    if window_graph is not None and window_graph.matched and window_graph.groups:
        scale = graph.mean_cycle_ns / window_graph.mean_cycle_ns
        latency_ns = _latency_ns(window_graph, context.message)
        overlap_ns = _on_this_machine(context, window_graph, perfect_overlap(window_graph))
        if latency_ns is not None:
            link_ns = faster_link(window_graph, _TWICE, latency_ns)
            favoured_ns = _favoured(context, window_graph, favoured_cap_bytes, latency_ns)
    return WhatIfFacts(
        nobody_late_ms=_scaled(nobody_late(graph, context.attribution)),
        instant_data_ms=_scaled(instant_data(graph)),
        no_barriers_ms=_scaled(no_barriers(graph)),
        no_sync_ms=_scaled(no_sync(graph, context.reducer.synced_ns)),
        perfect_overlap_ms=_scaled(overlap_ns, scale),
        link_twice_as_fast_ms=_scaled(link_ns, scale),
        favoured_buckets_ms=_scaled(favoured_ns, scale),
    )


def _on_this_machine(context: Context, graph: Graph, step_ns: float | None) -> float | None:
    """Mean step with transfers beside the computation, as far as there are cores for both."""
    whole_ns = graph.mean_cycle_ns
    return None if step_ns is None else whole_ns - context.transfer_beside_ns(graph, whole_ns - step_ns)


def _favoured(
    context: Context, window_graph: Graph, cap_bytes: float | None, latency_ns: float
) -> float | None:
    rate, backward_ms = context.message.bytes_per_ns, context.reductions.backward_ms
    if rate is None or not cap_bytes or not backward_ms:
        return None
    return with_buckets(window_graph, cap_bytes, latency_ns, rate, backward_ms * 1e6)


def _scaled(step_ns: float | None, scale: float = 1.0) -> float | None:
    """ms"""
    return None if step_ns is None else step_ns * scale / 1e6


def _latency_ns(graph: Graph, message: MessageCost) -> float | None:
    """ns of a message of no bytes, None where it is not known."""
    if message.latency_us is None:
        return None
    if message.bytes_per_ns is not None:
        return message.latency_us * 1e3
    sizes = [
        group.message_bytes[:, k]
        for group in graph.groups
        for k, sync in enumerate(group.syncs)
        if sync.kind == SyncKind.GRADIENTS
    ]
    return 0.0 if sizes and np.median(np.concatenate(sizes)) >= _LATENCY_FROM_BYTES else None
