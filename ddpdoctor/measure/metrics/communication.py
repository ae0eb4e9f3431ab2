"""Collectives as facts: waiting apart from transfer, what is hidden, how many bytes, which links are slow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpdoctor.measure.facts import CommunicationFacts
from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.numerics import clip, intersect, subtract, total
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.measure.window import Window

from .bandwidth import bandwidth_points, large_bus_gb_per_s
from .breakdown import splits
from .links import slow_link_ranks
from .marked import communicating, in_marked_steps, marked_steps

_TRANSFERRING = (SyncKind.GRADIENTS, SyncKind.COLLECTIVE, SyncKind.BROADCAST, SyncKind.MODEL)
"""Synchronisations that move bytes; a barrier has a part of the breakdown of its own."""
_SHARDED = ("allgather", "reducescatter")
"""Operations with which sharded parameters and gradients travel (FSDP, ZeRO)."""


def communication_facts(
    graph: Graph,
    window_graph: Graph | None,
    logs: Sequence[RankLog],
    windows: Sequence[Window],
    latency_us: float | None,
) -> CommunicationFacts:
    """Waiting and transfer in ``graph``, which speaks for the job, and what only a window can show.

    Single collectives, their bytes and their bandwidth are in the window; where the step logs speak, they say how long the
    ranks wait and transfer over the whole run. ``latency_us`` is what :func:`.messages.message_cost` found.
    """
    shown = graph if window_graph is None else window_graph
    logs_speak = graph is not window_graph and graph.matched > 0
    matched = graph if logs_speak else shown
    wait_ms, exposed_ms, _ = wait_and_transfer_ms(matched)
    total_ms = wait_and_transfer_ms(shown)[2]
    # A few steps of less transfer than the run exposes on average do not tell how much of it is hidden.
    tells = not (logs_speak and total_ms is not None and total_ms < (exposed_ms or 0.0))
    hosts = [rank.host for rank in (logs if window_graph is None else windows)]
    median_bus, best_bus = large_bus_gb_per_s(bandwidth_points(shown, hosts))
    bytes_per_step = _bytes_per_step(windows)
    return CommunicationFacts(
        wait_ms=wait_ms,
        transfer_ms=exposed_ms,
        total_transfer_ms=total_ms if tells else None,
        exposed_ms=_exposed_ms(windows),
        hidden_share=_hidden_share(windows) if tells else None,
        bytes_per_step=bytes_per_step or _graph_bytes_per_step(graph) if logs_speak else bytes_per_step,
        sharded_share=_sharded_share(windows),
        collectives_per_step=_collectives_per_step(windows),
        bus_gb_per_s=median_bus,
        best_bus_gb_per_s=best_bus,
        latency_us=latency_us,
        matched=matched.matched,
        unmatched=matched.unmatched,
        refused=shown.refused,
        whole=shown.wholeness.whole if shown.wholeness else None,
        lacking_left=shown.wholeness.left if shown.wholeness else None,
        lacking_lost=shown.wholeness.lost if shown.wholeness else None,
        lacking_cut=shown.wholeness.cut if shown.wholeness else None,
        clock_error_us=shown.clock_error_ns / 1e3 if shown.clock_error_ns is not None else None,
        slow_link_ranks=_slow_link_ranks(graph, window_graph, logs, windows),
    )


def wait_and_transfer_ms(graph: Graph) -> tuple[float, float, float] | tuple[None, None, None]:
    """Exposed wait, exposed transfer and all transfer in collectives (barriers apart), means over ranks and cycles, ms per
    step; None where no collectives were matched."""
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
    """|communication and computation| / |communication|, median rank: HolisticTraceAnalysis's overlap."""
    shares = []
    for window in windows:
        in_collectives = communicating(window)
        if whole := total(in_collectives):
            shares.append(total(intersect(in_collectives, window.compute)) / whole)
    return float(np.median(shares)) if shares else None


def _exposed_ms(windows: Sequence[Window]) -> float | None:
    """Exposed communication inside the marked steps, per step, median rank."""
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
    """Bytes of the collectives in the marked steps, median rank of those whose messages' sizes are known."""
    sums = [
        float(np.nansum(window.collectives.bytes[in_marked_steps(window)]))
        for window in windows
        if len(window.collectives) and not np.isnan(window.collectives.bytes).all()
    ]
    return float(np.median(sums)) / marked_steps(windows) if sums else None


def _graph_bytes_per_step(graph: Graph) -> float | None:
    """Bytes of the graph's synchronisations per cycle; None where no size is known."""
    sums = [float(np.nansum(group.message_bytes)) for group in graph.groups]
    return sum(sums) / max(graph.cycles, 1) or None


def _sharded_share(windows: Sequence[Window]) -> float | None:
    """Of the time in collectives with which gradients, or the parameters that they belong to, travel."""
    spent = [
        (float(length), operation in _SHARDED)
        for window in windows
        for length, operation, kind in zip(
            window.collectives.end - window.collectives.start,
            window.collectives.operation,
            window.collectives.kind,
            strict=True,
        )
        if kind in (SyncKind.GRADIENTS, SyncKind.MODEL)
    ]
    whole = sum(length for length, _ in spent)
    return sum(length for length, sharded in spent if sharded) / whole if whole else None


def _collectives_per_step(windows: Sequence[Window]) -> float | None:
    counts = [in_marked_steps(window).sum() for window in windows]
    return float(np.median(counts)) / marked_steps(windows) if counts else None


def _slow_link_ranks(
    graph: Graph, window_graph: Graph | None, logs: Sequence[RankLog], windows: Sequence[Window]
) -> list[int] | None:
    """By the window where its collectives were matched: it shows more of them than the step logs."""
    compared = window_graph if window_graph is not None and window_graph.matched else graph
    ranks = windows if compared is window_graph else logs
    return slow_link_ranks(compared, [rank.host for rank in ranks])
