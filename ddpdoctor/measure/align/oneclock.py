"""Windows of several hosts on the first host's clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.window import Window

from .clockfit import ClockFit, fit_clock, vote_offset
from .labels import group_keys, labels

LOOSEST_NS = 2_000_000
"""Ends further apart are no pair: NTP leaves milliseconds between hosts, and a vote has taken out the offset by then."""

Ends = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Ends of the same collectives on two ranks, each on its own clock."""


def on_one_clock(windows: Sequence[Window]) -> tuple[list[Window], float]:
    """(The windows on the first host's clock, error bound in ns). All have collectives."""
    hosts: dict[str, list[int]] = defaultdict(list)
    for position, window in enumerate(windows):
        # Files without a host name may come from different hosts: each is aligned by itself.
        hosts[window.host or f"rank {window.rank}"].append(position)
    first, *others = hosts.values()
    moved, aligned = list(windows), list(first)
    errors: list[float] = []
    for members in others:
        pairs = [_paired(moved[reference], windows[m]) for m in members for reference in aligned[:2]]
        joined = [pair for pair in pairs if pair is not None]
        if not joined:
            continue
        fit = fit_clock(np.concatenate([a for a, _ in joined]), np.concatenate([b for _, b in joined]))
        for position in members:
            moved[position] = _on_clock(windows[position], fit)
        errors.append(fit.error_ns)
        aligned += members
    return moved, max(errors or _errors_within(windows), default=0.0)


def _errors_within(windows: Sequence[Window]) -> list[float]:
    """Error bounds of the first windows that share a clock."""
    pairs = [_paired(windows[0], window) for window in windows[1:3]]
    return [fit_clock(*pair).error_ns for pair in pairs if pair is not None]


def _paired(reference: Window, other: Window) -> Ends | None:
    """None where less than two collectives are the same."""
    a, b = reference.collectives, other.collectives
    if (a.sequence >= 0).any() and (b.sequence >= 0).any():
        theirs, ours = group_keys(other), group_keys(reference)
        there = {(theirs[j], int(b.sequence[j])): j for j in range(len(b)) if b.sequence[j] >= 0}
        both = [(i, there[key]) for i in range(len(a)) if (key := (ours[i], int(a.sequence[i]))) in there]
    else:
        offset = vote_offset(a.end, labels(reference), b.end, labels(other))
        if offset is None:
            return None
        both = _nearest(a.end, labels(reference), b.end - int(offset), labels(other))
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
            if abs(int(b[j]) - int(a[i])) <= LOOSEST_NS:
                pairs.append((i, j))
    return pairs


def _on_clock(window: Window, fit: ClockFit) -> Window:
    """The window by another clock. It is short: drift is applied to the collectives and to work one by one, and to
    everything else at its middle."""
    middle = np.array([(window.span[0] + window.span[1]) // 2])
    whole = int(fit.correction(middle)[0])
    moved, own = window.shifted(whole), window.collectives

    def on_clock(edges: NDArray[Any]) -> NDArray[Any]:
        return edges + fit.correction(edges - whole) - whole

    collectives = replace(
        moved.collectives,
        start=own.start + fit.correction(own.start),
        end=own.end + fit.correction(own.end),
        ready=own.ready + fit.correction(own.ready),
    )
    sets = {name: (on_clock(start), on_clock(end)) for name, (start, end) in moved.sets.items()}
    return replace(moved, collectives=collectives, sets=sets)
