"""The same collective on every rank: by process group and sequence number where the trace has them, else by
where ends coincide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.window import Window

from .clockfit import ClockFit, fit_clock, vote_offset

CREDIBLE_SPREAD_NS = 5_000_000
"""Ends of one collective lie 26 to 90 microseconds apart within a host; beyond this the pairs are not the
same collective."""
CREDIBLE_GLOO_SPREAD_NS = 100_000_000
"""Gloo's ranks leave a collective when their threads get a CPU."""
_PLACES = 1_000_000
_LEAST_MATCHED = 0.5
_LOOSEST_NS = 2_000_000
_TIGHTEST_NS = 150_000


@dataclass
class Matched:
    """Collectives matched over windows: [M, R] row in each window's ``comms``, -1 where the rank has no part
    in it."""

    rows: NDArray[np.int64]
    expected: NDArray[np.int64]
    """[M] how many of the ranks at hand should take part."""
    unmatched: int = 0
    refused: str | None = None
    error_ns: float | None = None
    notes: list[str] = field(default_factory=list)


def align_and_match(windows: Sequence[Window]) -> Matched:
    """Put all windows on one clock (in place) and match their collectives. Ranks without collectives keep
    their clock."""
    _number_by_step(windows)
    active = [w for w in windows if len(w.comms)]
    if len(active) < 2:
        unmatched = sum(len(w.comms) for w in windows)
        return Matched(np.empty((0, len(windows)), np.int64), np.empty(0, np.int64), unmatched)
    error = _align(active)
    matched = _match(windows, max(_TIGHTEST_NS, min(_LOOSEST_NS, 6 * error)))
    matched.error_ns = error
    _judge(windows, matched)
    return matched


def _number_by_step(windows: Sequence[Window]) -> None:
    """Sequence numbers for Gloo, which writes none: step and place in the step.

    Gloo's ends scatter by milliseconds on a busy machine, so coincidence of ends cannot pair them. Only steps
    in which all ranks issued the same operations are numbered; a window may begin or end within a step.
    """
    active = [w for w in windows if len(w.comms)]
    if any(w.on_device or not w.steps or (w.comms.sequence >= 0).any() for w in active) or len(active) < 2:
        return
    orders = [_per_step(window) for window in active]
    common = set.intersection(*(set(order) for order in orders))
    for step in common:
        names = [
            [window.comms.operation[row] for row in order[step]]
            for window, order in zip(active, orders, strict=True)
        ]
        if all(name == names[0] for name in names):
            for window, order in zip(active, orders, strict=True):
                for place, row in enumerate(order[step]):
                    window.comms.sequence[row] = step * _PLACES + place


def _per_step(window: Window) -> dict[int, list[int]]:
    """Rows of ``comms`` by the step in which the host issued them, in order of issue."""
    starts = np.array([start for _, start, _ in window.steps])
    found: dict[int, list[int]] = defaultdict(list)
    for row in np.argsort(window.comms.issued, kind="stable"):
        at = window.comms.issued[row]
        index = int(np.searchsorted(starts, at, side="right")) - 1
        if index >= 0 and at < window.steps[index][2]:
            found[window.steps[index][0]].append(int(row))
    return found


def _labels(window: Window) -> list[Hashable]:
    comms, keys = window.comms, _group_keys(window)
    return [
        (
            keys[i],
            comms.operation[i],
            -1.0 if np.isnan(comms.bytes[i]) else float(comms.bytes[i]),
        )
        for i in range(len(comms))
    ]


def _group_keys(window: Window) -> list[Hashable]:
    """Process group of each collective, told apart by its ranks where the file lists them: names repeat between
    disjoint groups in some versions. As text, which remembers its hash: a group may have thousands of ranks."""
    known: dict[Hashable, Hashable] = {}
    for group in window.trace.meta.process_groups:
        if group.get("ranks"):
            known.setdefault(str(group.get("pg_name")), f"{group.get('pg_name')} {group['ranks']}")
    return [known.get(name, name) for name in window.comms.group]


def _align(windows: list[Window]) -> float:
    """Shift every host's windows onto the first one's clock; returns the error bound, ns."""
    hosts: dict[str, list[Window]] = defaultdict(list)
    for window in windows:
        # Files without a host name may come from different hosts: each is aligned by itself.
        hosts[window.host or f"rank {window.rank}"].append(window)
    groups = list(hosts.values())
    errors = []
    done = list(groups[0])
    for members in groups[1:]:
        pairs = [_pair(reference, window) for window in members for reference in done[:2]]
        joined = [pair for pair in pairs if pair is not None]
        if not joined:
            continue
        fit = fit_clock(np.concatenate([p[0] for p in joined]), np.concatenate([p[1] for p in joined]))
        for window in members:
            _apply(window, fit)
        errors.append(fit.error_ns)
        done += members
    if not errors:
        pairs = [_pair(windows[0], window) for window in windows[1:3]]
        errors = [fit_clock(*pair).error_ns for pair in pairs if pair is not None]
    return max(errors, default=0.0)


def _pair(reference: Window, other: Window) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Ends of the same collectives on both, each on its own clock."""
    a, b = reference.comms, other.comms
    if (a.sequence >= 0).any() and (b.sequence >= 0).any():
        theirs, ours = _group_keys(other), _group_keys(reference)
        there = {(theirs[j], int(b.sequence[j])): j for j in range(len(b)) if b.sequence[j] >= 0}
        both = [(i, there[key]) for i in range(len(a)) if (key := (ours[i], int(a.sequence[i]))) in there]
    else:
        offset = vote_offset(a.end, _labels(reference), b.end, _labels(other))
        if offset is None:
            return None
        both = _nearest(a.end, _labels(reference), b.end - int(offset), _labels(other))
    if len(both) < 2:
        return None
    left, right = np.array(both).T
    return a.end[left], b.end[right]


def _nearest(
    a: NDArray[np.int64], a_labels: list[Hashable], b: NDArray[np.int64], b_labels: list[Hashable]
) -> list[tuple[int, int]]:
    """Pairs of like events whose ends lie nearest to each other, within the loosest tolerance."""
    by_label: dict[Hashable, list[int]] = defaultdict(list)
    for j, label in enumerate(b_labels):
        by_label[label].append(j)
    pairs = []
    for i, label in enumerate(a_labels):
        candidates = by_label.get(label)
        if candidates:
            j = min(candidates, key=lambda j: abs(int(b[j]) - int(a[i])))
            if abs(int(b[j]) - int(a[i])) <= _LOOSEST_NS:
                pairs.append((i, j))
    return pairs


def _apply(window: Window, fit: ClockFit) -> None:
    """A window is short: its drift is applied to the collectives one by one, and to everything else at its
    middle."""
    middle = np.array([(window.span[0] + window.span[1]) // 2])
    whole = int(fit.correction(middle)[0])
    start = fit.correction(window.comms.start) - whole
    end = fit.correction(window.comms.end) - whole
    ready = fit.correction(window.comms.ready) - whole
    window.shift(whole)
    window.comms.start = window.comms.start + start
    window.comms.ready = window.comms.ready + ready
    window.comms.end = window.comms.end + end
    window.sets = {
        name: tuple(edge + fit.correction(edge - whole) - whole for edge in intervals)  # type: ignore[misc]
        for name, intervals in window.sets.items()
    }


def _match(windows: Sequence[Window], tolerance_ns: float) -> Matched:
    by_group: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for position, window in enumerate(windows):
        keys = _group_keys(window)
        for row in range(len(window.comms)):
            if not window.comms.point_to_point[row]:
                by_group[keys[row]].append((position, row))
    rows, expected = [], []
    unmatched = sum(int(w.comms.point_to_point.sum()) for w in windows)
    for members in by_group.values():
        world = len({position for position, _ in members})
        numbered = any(windows[p].comms.sequence[r] >= 0 for p, r in members)
        found = _by_sequence(windows, members) if numbered else _by_ends(windows, members, tolerance_ns)
        for cluster in found:
            if len(cluster) < 2:
                unmatched += len(cluster)
                continue
            line = np.full(len(windows), -1, np.int64)
            for position, row in cluster:
                line[position] = row
            rows.append(line)
            expected.append(world)
    table = np.array(rows, np.int64).reshape(-1, len(windows))
    return Matched(table, np.array(expected, np.int64), unmatched)


def _by_sequence(windows: Sequence[Window], members: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    found: dict[tuple[int, str], dict[int, tuple[int, int]]] = defaultdict(dict)
    alone: list[list[tuple[int, int]]] = []
    for position, row in members:
        comms = windows[position].comms
        if comms.sequence[row] < 0:
            alone.append([(position, row)])
            continue
        found[int(comms.sequence[row]), comms.operation[row]].setdefault(position, (position, row))
    return [list(cluster.values()) for cluster in found.values()] + alone


def _by_ends(
    windows: Sequence[Window], members: list[tuple[int, int]], tolerance_ns: float
) -> list[list[tuple[int, int]]]:
    """Clusters of ends, one per rank, alike in operation and size, no further apart than the tolerance."""
    ordered = sorted(members, key=lambda m: int(windows[m[0]].comms.end[m[1]]))
    clusters: list[list[tuple[int, int]]] = []
    open_clusters: dict[Hashable, list[tuple[int, int]]] = {}
    for position, row in ordered:
        comms = windows[position].comms
        size = comms.bytes[row]
        label = (comms.operation[row], -1.0 if np.isnan(size) else float(size))
        cluster = open_clusters.get(label)
        first_end = int(windows[cluster[0][0]].comms.end[cluster[0][1]]) if cluster else 0
        full = cluster is not None and position in {p for p, _ in cluster}
        if cluster is None or full or int(comms.end[row]) - first_end > tolerance_ns:
            cluster = open_clusters[label] = []
            clusters.append(cluster)
        cluster.append((position, row))
    return clusters


def _judge(windows: Sequence[Window], matched: Matched) -> None:
    """Refuse a matching that cannot be right: too few pairs, or ends too far apart."""
    total = sum(int((~w.comms.point_to_point).sum()) for w in windows)
    inside = int((matched.rows >= 0).sum())
    if total and inside < _LEAST_MATCHED * total:
        matched.refused = (
            f"only {inside} of {total} collectives end together on several ranks: the windows do not overlap, events were left "
            "out of the traces, or they are of different jobs"
        )
        return
    spreads = []
    for line in matched.rows:
        ends = [int(windows[p].comms.end[row]) for p, row in enumerate(line) if row >= 0]
        spreads.append(max(ends) - min(ends))
    credible = CREDIBLE_SPREAD_NS if any(w.on_device for w in windows) else CREDIBLE_GLOO_SPREAD_NS
    if spreads and np.median(spreads) > credible:
        matched.refused = (
            f"the ends of the same collectives lie {np.median(spreads) / 1e6:.0f} ms apart (median), so they are not the same "
            "collectives"
        )
