"""The same collective on every rank: by process group and sequence number where the trace has them, else by
where ends coincide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.window import Window

from .labels import group_keys
from .numbering import numbered_by_step
from .oneclock import LOOSEST_NS, on_one_clock


@dataclass(frozen=True)
class Tuning:
    """What is credible, and how near to each other ends must lie."""

    credible_spread_ns: int = 5_000_000
    """Ends of one collective lie 26 to 90 microseconds apart within a host; beyond this the pairs are not the
    same collective."""
    credible_gloo_spread_ns: int = 100_000_000
    """Gloo's ranks leave a collective when their threads get a CPU."""
    least_matched: float = 0.5
    """Part of the collectives that must be matched: of windows that overlap by less, most are somebody else's."""
    tightest_ns: int = 150_000
    """Ends as near as this coincide, however well the clocks agree: above the 90 microseconds that are seen within a host."""
    scatters: float = 6.0
    """So many times the clocks' error may lie between two ends: of normal errors, none in a million is left out."""


TUNING = Tuning()

Member = tuple[int, int]
"""(position of the window, row in its collectives)"""


@dataclass(frozen=True)
class Matched:
    """Collectives matched over windows."""

    rows: NDArray[np.int64]
    """[M, R] row in each window's collectives, -1 where the rank has no part in it."""
    unmatched: int = 0
    refused: str | None = None
    """Why the matching cannot be right."""
    error_ns: float | None = None
    """Error bound of the clocks' alignment; None where nothing was aligned."""


def align_and_match(windows: Sequence[Window]) -> tuple[list[Window], Matched]:
    """(The windows on one clock, their collectives matched). Ranks without collectives keep their clock."""
    numbered = numbered_by_step(windows)
    active = [position for position, window in enumerate(numbered) if len(window.collectives)]
    if len(active) < 2:
        unmatched = sum(len(window.collectives) for window in numbered)
        return numbered, Matched(np.empty((0, len(windows)), np.int64), unmatched)
    moved, error_ns = on_one_clock([numbered[position] for position in active])
    by_position = dict(zip(active, moved, strict=True))
    aligned = [by_position.get(position, window) for position, window in enumerate(numbered)]
    tolerance_ns = max(TUNING.tightest_ns, min(LOOSEST_NS, TUNING.scatters * error_ns))
    rows, unmatched = _match(aligned, tolerance_ns)
    return aligned, Matched(rows, unmatched, _refused(aligned, rows), error_ns)


def _match(windows: Sequence[Window], tolerance_ns: float) -> tuple[NDArray[np.int64], int]:
    """(:attr:`Matched.rows`, how many collectives have no partner)."""
    by_group: dict[Hashable, list[Member]] = defaultdict(list)
    for position, window in enumerate(windows):
        keys = group_keys(window)
        for row in range(len(window.collectives)):
            if not window.collectives.point_to_point[row]:
                by_group[keys[row]].append((position, row))
    unmatched = sum(int(window.collectives.point_to_point.sum()) for window in windows)
    lines = []
    for members in by_group.values():
        numbered = any(windows[p].collectives.sequence[r] >= 0 for p, r in members)
        clusters = _by_sequence(windows, members) if numbered else _by_ends(windows, members, tolerance_ns)
        for cluster in clusters:
            if len(cluster) < 2:
                unmatched += len(cluster)
                continue
            line = np.full(len(windows), -1, np.int64)
            for position, row in cluster:
                line[position] = row
            lines.append(line)
    return np.array(lines, np.int64).reshape(-1, len(windows)), unmatched


def _by_sequence(windows: Sequence[Window], members: list[Member]) -> list[list[Member]]:
    """Clusters of like operations with one number; what has none is alone."""
    numbered: dict[tuple[int, str], dict[int, Member]] = defaultdict(dict)
    alone: list[list[Member]] = []
    for position, row in members:
        comms = windows[position].collectives
        if comms.sequence[row] < 0:
            alone.append([(position, row)])
            continue
        numbered[int(comms.sequence[row]), comms.operation[row]].setdefault(position, (position, row))
    return [list(cluster.values()) for cluster in numbered.values()] + alone


def _by_ends(windows: Sequence[Window], members: list[Member], tolerance_ns: float) -> list[list[Member]]:
    """Clusters of ends, one per rank, alike in operation and size, no further apart than the tolerance."""
    ordered = sorted(members, key=lambda m: int(windows[m[0]].collectives.end[m[1]]))
    clusters: list[list[Member]] = []
    open_clusters: dict[Hashable, list[Member]] = {}
    for position, row in ordered:
        comms = windows[position].collectives
        size = comms.bytes[row]
        label = (comms.operation[row], -1.0 if np.isnan(size) else float(size))
        cluster = open_clusters.get(label)
        first_end = int(windows[cluster[0][0]].collectives.end[cluster[0][1]]) if cluster else 0
        full = cluster is not None and position in {p for p, _ in cluster}
        if cluster is None or full or int(comms.end[row]) - first_end > tolerance_ns:
            cluster = open_clusters[label] = []
            clusters.append(cluster)
        cluster.append((position, row))
    return clusters


def _refused(windows: Sequence[Window], rows: NDArray[np.int64]) -> str | None:
    """Why a matching cannot be right: too few pairs, or ends too far apart."""
    whole = sum(int((~window.collectives.point_to_point).sum()) for window in windows)
    inside = int((rows >= 0).sum())
    if whole and inside < TUNING.least_matched * whole:
        return (
            f"only {inside} of {whole} collectives end together on several ranks: the windows do not overlap, events were left "
            "out of the traces, or they are of different jobs"
        )
    spreads = []
    for line in rows:
        ends = [int(windows[position].collectives.end[row]) for position, row in enumerate(line) if row >= 0]
        spreads.append(max(ends) - min(ends))
    on_device = any(window.on_device for window in windows)
    credible = TUNING.credible_spread_ns if on_device else TUNING.credible_gloo_spread_ns
    if spreads and np.median(spreads) > credible:
        return (
            f"the ends of the same collectives lie {np.median(spreads) / 1e6:.0f} ms apart (median), so they are not the same "
            "collectives"
        )
    return None
