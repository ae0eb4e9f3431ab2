"""Put the traces of several hosts on the first host's clock.

All members of a collective leave it together: an all-reduce ends for all ranks when the last piece has arrived. So the ends of the same
collective on two ranks differ by the offset between their clocks plus tens of microseconds of scatter, independently of which rank was
late. Between hosts the offset and its drift are fitted robustly to these differences; within a host the clock is shared. The error of
NTP between hosts is milliseconds, that of CUPTI's conversion hundreds of microseconds.

Matching and offset are found together. Steps and places, or a vote, give candidate offsets. Each is refined in a growing part of the
window, while the drift becomes known. The one by equal steps or with most matches is used, unless another has clearly less scatter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import ArrayLike, NDArray

from ddpdoctor.measure.numerics import Array, Ints, median, scatter_of
from ddpdoctor.measure.window import Window

from .sequence_alignment import (
    SURE,
    CollectiveSequence,
    Groups,
    align_sequences,
    certain_pairs,
    in_equal_steps,
)


class FitTuning(msgspec.Struct, frozen=True):
    """Thresholds of the vote on offsets and of the fit of a drift."""

    bin_ns: int = 200_000
    """Offsets within this time agree: more than the 90 microseconds by which ends scatter within a host."""
    reach: int = 1200
    """Events of the other clock, around its middle, that are compared: windows do not begin together."""
    most_paired: int = 200
    """Events of the reference, around its middle, that vote: enough for any vote, and limits the time."""
    peaks: int = 12
    """Maximum number of candidate offsets: those one step apart have nearly as many votes."""
    near_ns: int = 50_000_000
    """Largest offset of a synchronised clock; larger ones are tried later."""
    nearly: float = 0.5
    """Minimum votes as a share of the most votes; fewer are by chance. If ends scatter, the right offset loses many votes."""
    drift_events: int = 8
    """Minimum number of events for a drift: the scatter of fewer does not show the error of the slope."""
    usual_drift: float = 1e-4
    """Standard deviation of drift as a share of time: crystals drift by 1e-4 at most. A fitted drift is weighted by its error relative
    to this: in a window of 50 ms, in which a clock drifts by 5 us at most, the ends of collectives scatter by 15 us and do not show it."""
    most_drift: float = 1e-3
    """Largest drift: NTP slews by 5e-4."""
    trims: int = 4
    """Rounds of trimming, after which it has converged."""
    outlier: float = 4.0
    """Standard deviations beyond which a difference is trimmed."""
    least_scatter_ns: float = 2_000.0
    """Differences within this of the fit are not trimmed: times are rounded to the microsecond."""
    fewest_left: int = 3
    """Minimum number of pairs after trimming."""


FIT = FitTuning()


class ClockFit(msgspec.Struct, frozen=True):
    """``common = local - (offset_ns + drift * (local - origin_ns))``."""

    offset_ns: float
    drift: float
    origin_ns: float
    error_ns: float
    """Robust scatter of the residuals: the error bound of a single collective's alignment."""
    pairs: int

    def correction(self, times: Ints) -> Ints:
        """ns to add to local times."""
        local = np.asarray(times, np.float64) - self.origin_ns
        result: Ints = -np.round(self.offset_ns + self.drift * local).astype(np.int64)
        return result


def vote_offsets(reference: Ints, reference_labels: ArrayLike, other: Ints, labels: ArrayLike) -> list[float]:
    """Offsets of ``other`` relative to ``reference`` (ns) on which many pairs of events with equal labels agree; plausible ones first,
    then by distance to zero; [] without any pair.

    Events are in order of time. If steps repeat evenly, offsets one step apart get nearly as many votes: this function does not
    choose between them.
    """
    ours, theirs = _middle(len(reference), FIT.most_paired), _middle(len(other), FIT.reach)
    alike = np.asarray(reference_labels)[ours][:, None] == np.asarray(labels)[theirs]
    values = np.sort((other[theirs] - reference[ours][:, None])[alike]).astype(np.float64)
    votes = np.searchsorted(values, values + FIT.bin_ns, side="right") - np.arange(len(values))
    found: list[float] = []
    left = votes.copy()
    while len(found) < FIT.peaks and left.size and left.max() >= max(1.0, FIT.nearly * votes.max()):
        peak = int(left.argmax())
        found.append(median(values[peak : peak + int(votes[peak])]))
        left[np.abs(values - values[peak]) <= 2 * FIT.bin_ns] = 0
    return sorted(found, key=lambda offset: (abs(offset) >= FIT.near_ns, abs(offset)))


def _middle(count: int, most: int) -> slice:
    begin = max(0, (count - most) // 2)
    return slice(begin, begin + most)


def fit_clock(reference: Ints, other: Ints) -> ClockFit:
    """Offset and drift of ``other`` against ``reference`` from paired ends (ns), by repeated trimming of
    outliers."""
    ends = np.asarray(other, np.float64)
    origin = median(ends) if len(other) else 0.0
    difference = ends - np.asarray(reference, np.float64)
    local = ends - origin
    keep = np.ones(len(difference), bool)
    offset, drift = median(difference) if len(difference) else 0.0, 0.0
    for _ in range(FIT.trims):
        drift = _drift(local[keep], difference[keep], drift)
        offset = median(difference[keep] - drift * local[keep])
        left = np.abs(difference - offset - drift * local)
        scatter = float(scatter_of(left[keep]))
        trimmed = left <= max(FIT.outlier * scatter, FIT.least_scatter_ns)
        if (trimmed == keep).all() or trimmed.sum() < FIT.fewest_left:
            break
        keep = trimmed
    left = np.abs(difference - offset - drift * local)
    error = float(scatter_of(left)) if len(left) else 0.0
    return ClockFit(offset, drift, origin, error, len(difference))


def _drift(local: Array, difference: Array, before: float) -> float:
    """Slope of the difference over time, shrunk towards 0 by its error; ``before`` if there are too few events, 0 if it exceeds any real
    drift."""
    if len(local) < FIT.drift_events or not (span := np.ptp(local)):
        return before
    # The median of the slopes between events half the window apart is robust to outliers on either side.
    order, half = np.argsort(local, kind="stable"), len(local) // 2
    run, rise = (of[half:] - of[: len(of) - half] for of in (local[order], difference[order]))
    drift = median(rise[run > 0] / run[run > 0]) if (run > 0).any() else 0.0
    left = difference - drift * local
    # Error of the slope through events spread evenly over the span: https://en.wikipedia.org/wiki/Simple_linear_regression
    error = float(scatter_of(np.abs(left - median(left)))) * np.sqrt(12 / len(local)) / span
    known = FIT.usual_drift**2 / (FIT.usual_drift**2 + error**2)
    return drift * known if abs(drift) <= FIT.most_drift else 0.0


BY_STREAM = "stream "
"""Names of groups that only their stream identifies begin with this."""


def is_by_stream(key: Hashable) -> bool:
    """Whether only a stream identifies the process group: ranks with this key may be in several groups, one per host for example."""
    return isinstance(key, str) and key.startswith(BY_STREAM)


class OneGroupTuning(msgspec.Struct, frozen=True):
    """Thresholds of the unpaired collectives of two ranks of one process group. Profilers lose 1 % of the events at most; then both ranks
    lack more than this in 0.1 % of windows of 10 collectives and in less of longer ones (binomial). In two groups in one of which a rank
    is late, the ends of most collectives differ."""

    lacking: float = 0.05
    """Share of the collectives in the time that both windows cover."""
    fewest: int = 2
    """Minimum number of them: a profiler may lose a single event on each rank."""


ONE_GROUP = OneGroupTuning()


def can_be_one_group(reference: CollectiveSequence, other: CollectiveSequence, row: Ints) -> bool:
    """Whether two ranks' collectives can belong to one process group: not both lack collectives of the other. ``row``: see
    :func:`align_sequences`."""
    begin = max(int(reference.end.min()), int(other.end.min()))
    until = min(int(reference.end.max()), int(other.end.max()))
    paired = np.zeros(len(reference), bool)
    paired[row[row >= 0]] = True
    lacking = [
        int((~has & (begin <= of.end) & (of.end <= until)).sum())
        for of, has in ((reference, paired), (other, row >= 0))
    ]
    return min(lacking) < max(ONE_GROUP.fewest, ONE_GROUP.lacking * (int(paired.sum()) + min(lacking)))


Ends = tuple[Ints, Ints]
"""Ends of the same collectives on two ranks, each on its own clock."""


class SearchTuning(msgspec.Struct, frozen=True):
    """Thresholds of the comparison of candidate offsets."""

    references: int = 2
    """Ranks with which each is compared: a second one outweighs disturbed ends of the first."""
    tried: int = 1000
    """Collectives by which a candidate is tested; a drift of 1e-4 moves them by microseconds."""
    growth: int = 4
    """Factor by which the fitted part of the window grows."""
    as_many: float = 0.9
    """Share of the most pairs that counts as equally many."""
    by_step: float = 0.5
    """Share of the most pairs that is enough for an offset by step numbers. Windows that begin in different steps have only some
    collectives in common, and with steps of equal length an offset by one step may match more."""
    clearly: float = 0.5
    """Share of another offset's scatter below which an offset is clearly better."""
    settling: int = 2
    """Final rounds of matching and fitting, which give the error of the clocks."""


SEARCH = SearchTuning()


def align_trace_clocks(
    windows: Sequence[Window], groups: Sequence[Groups]
) -> tuple[list[Window], list[Groups], float]:
    """(windows on the first host's clock, their collectives on it, error bound in ns). All windows have collectives."""
    first, *others = _by_host(windows)
    moved, on_clock, aligned = list(windows), list(groups), list(first)
    errors: list[float] = []
    unaligned = others
    while unaligned:
        not_fitted = []
        for members in unaligned:
            fit = _fit(
                [
                    (on_clock[reference], groups[m])
                    for m in members
                    # The first ranks on the common clock that share a process group with this one.
                    for reference in islice(
                        (other for other in aligned if groups[other].keys() & groups[m].keys()),
                        SEARCH.references,
                    )
                ]
            )
            if fit is None:
                not_fitted.append(members)
                continue
            for position in members:
                moved[position] = _on_clock(windows[position], fit)
                on_clock[position] = {
                    key: (rows, of.by_clock(fit.correction(of.end)))
                    for key, (rows, of) in groups[position].items()
                }
            errors.append(fit.error_ns)
            aligned += members
        if len(not_fitted) == len(unaligned):
            break
        unaligned = not_fitted
    if not errors:
        # No clock is corrected. The error is the offset of the ends in the first windows, or their scatter if it is larger.
        for other in groups[1 : 1 + SEARCH.references]:
            shared = groups[0].keys() & other.keys()
            by_stream = any(map(is_by_stream, shared))
            # Of groups by stream the closest one, as the ranks may be in different ones.
            parts = [[key] for key in shared] if by_stream else [list(shared)]
            pairs = [_joined([_ends({key: groups[0][key] for key in keys}, other, 0.0)]) for keys in parts]
            fits = [fit_clock(*pair) for pair in pairs if pair is not None]
            errors += [min(max(fit.error_ns, abs(fit.offset_ns)) for fit in fits)] if fits else []
    return moved, on_clock, max(errors, default=0.0)


def several_clocks(windows: Sequence[Window]) -> bool:
    """Whether the windows come from several hosts."""
    return len(_by_host(windows)) > 1


def _by_host(windows: Sequence[Window]) -> list[list[int]]:
    hosts: dict[str, list[int]] = defaultdict(list)
    for position, window in enumerate(windows):
        # Files without a host name may come from different hosts: each is aligned separately.
        hosts[window.host or f"rank {window.rank}"].append(position)
    return list(hosts.values())


def _joined(pairs: Sequence[Ends]) -> Ends | None:
    """The ends of all pairs concatenated; None for fewer than two collectives."""
    if not pairs:
        return None
    a, b = (np.concatenate(ends) for ends in zip(*pairs, strict=True))
    return (a, b) if len(a) > 1 else None


def _ends(reference: Groups, other: Groups, scatter_ns: float, fit: ClockFit | None = None) -> Ends:
    """Ends of the collectives of two ranks that match when ``other`` is on the clock of ``fit``."""
    ends: list[Ends] = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    for key in reference.keys() & other.keys():
        line, theirs = reference[key][1], other[key][1]
        moved = theirs if fit is None else theirs.by_clock(fit.correction(theirs.end))
        # An offset is a median of many ends, so its error is below the scatter of one.
        row = align_sequences(line, moved, scatter_ns, scatter_ns)
        if is_by_stream(key) and not can_be_one_group(line, moved, row):
            continue
        ends.append((line.end[row[row >= 0]], theirs.end[row >= 0]))
    a, b = zip(*ends, strict=True)
    return np.concatenate(a), np.concatenate(b)


def _fit(pairs: Sequence[tuple[Groups, Groups]]) -> ClockFit | None:
    """The clock of a host, by its ranks relative to ranks on the common clock."""
    found: list[tuple[ClockFit, Hashable]] = []
    for reference, other in pairs:
        sizes = {
            key: min(len(reference[key][1]), len(other[key][1])) for key in reference.keys() & other.keys()
        }
        keys = sorted(sizes, key=lambda key: -sizes[key])
        fits = ((_best_fit(reference[key][1], other[key][1]), key) for key in keys)
        known = ((fit, key) for fit, key in fits if fit is not None)
        if is_by_stream(keys[0]):
            found += [(fit, key) for fit, key in known if fit.pairs >= SEARCH.by_step * sizes[key]]
        else:
            # Of the process group with the most collectives for which a fit is found.
            found += islice(known, 1)
    if not found:
        return None
    by_stream = {key for _, key in found if is_by_stream(key)}
    # The ranks may be in different groups on a stream: the ends of one that they share are the closest.
    fit = min(
        (fit for fit, _ in found),
        key=lambda fit: (fit.error_ns, -fit.pairs) if by_stream else (-fit.pairs, fit.error_ns),
    )
    most_ns = SURE.scatters * max(fit.error_ns, FIT.least_scatter_ns)
    unlike = {key for of, key in found if key in by_stream and of.error_ns > most_ns}
    used = [[{key: each[key] for key in each.keys() - unlike} for each in pair] for pair in pairs]
    for _ in range(SEARCH.settling):
        joined = _joined([_ends(reference, other, fit.error_ns, fit) for reference, other in used])
        if joined is None:
            return fit
        fit = fit_clock(*joined)
    return fit


def _best_fit(line: CollectiveSequence, other: CollectiveSequence) -> ClockFit | None:
    """The fit by equal steps, or else with the most matching ends, unless another fit has clearly less scatter."""
    # Candidates: by step and place; by votes, and by place in the whole window.
    in_one_step = (replace(of, step=np.zeros_like(of.step)) for of in (line, other))
    tried = [in_equal_steps(line, other), in_equal_steps(*in_one_step)]
    same_step, same_place = (
        [fit_clock(line.end[row[row >= 0]], other.end[row >= 0])] if (row >= 0).any() else [] for row in tried
    )
    middle = float(np.median(other.end))
    votes = vote_offsets(line.end, line.label, other.end, other.label)
    voted = [ClockFit(offset, 0.0, middle, 0.0, 0) for offset in votes]
    by_step, others = (
        [fit for first in candidates if (fit := _refined(line, other, first)) is not None]
        for candidates in (same_step, [*voted, *same_place])
    )
    if not by_step and not others:
        return None
    most = max(fit.pairs for fit in (*by_step, *others))
    good = [fit for fit in by_step if fit.pairs >= SEARCH.by_step * most]
    good += [fit for fit in others if fit.pairs >= SEARCH.as_many * most]
    chosen = good[0]
    for fit in good[1:]:
        if fit.error_ns < SEARCH.clearly * chosen.error_ns:
            chosen = fit
    return chosen


def _refined(line: CollectiveSequence, other: CollectiveSequence, fit: ClockFit) -> ClockFit | None:
    """``fit`` refined by certain pairs in a growing part of the window; None if there are none."""
    size, count = SEARCH.tried, len(other)
    while True:
        begin = max(0, count // 2 - size // 2)
        part = other.select(np.arange(begin, min(count, begin + size)))
        moved = part.by_clock(fit.correction(part.end))
        first, last = int(moved.start.min()), int(moved.end.max())
        near = (line.end >= 2 * first - last) & (line.start <= 2 * last - first)
        nearby = line.select(np.flatnonzero(near))
        row = certain_pairs(nearby, moved) if len(nearby) else np.full(len(moved), -1)
        if (row >= 0).sum() < 2:
            return None
        fit = fit_clock(nearby.end[row[row >= 0]], part.end[row >= 0])
        if size >= count:
            return fit
        size *= SEARCH.growth


def _on_clock(window: Window, fit: ClockFit) -> Window:
    """The window on the common clock. The correction includes drift for each collective and each interval of work; all other times get
    the correction at the window's middle, because the window is short."""
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
