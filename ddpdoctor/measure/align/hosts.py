"""One clock for the step logs of several hosts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.steplog import Key, Point, RankLog, rank_points

from .chronology import blocks
from .clockfit import fit_clock

_FEWEST = 3
_BESIDE_GAP = 32
"""Collectives on either side of a gap that tell whether a clock was set in it."""
_SET_NS = 20_000_000
"""Clocks that differ by this much more behind a gap, beyond any drift, were set in it."""
_MOST_DRIFT = 5e-4
"""As which time servers slew a clock at most."""


def align_logs(logs: Sequence[RankLog], notes: list[str]) -> None:
    """Shift each host's logs (in place) onto the first host's clock, by the ends of the collectives that both
    took part in."""
    hosts: dict[str, list[RankLog]] = defaultdict(list)
    for log in logs:
        hosts[log.host].append(log)
    if len(hosts) < 2:
        return
    names = list(hosts)
    leader = hosts[names[0]][0]
    reference = _ends(leader)
    for name in names[1:]:
        other = _ends(hosts[name][0])
        keys = sorted(set(reference) & set(other), key=lambda key: reference[key].end)
        if len(keys) < _FEWEST:
            notes.append(
                f"Hosts {names[0]} and {name} have no collectives in common: their clocks could not be compared, and are taken as they are."
            )
            continue
        ours, theirs = [np.array([of[key].end for key in keys], np.int64) for of in (reference, other)]
        places = [
            _places(log, [of[key].step for key in keys])
            for log, of in ((leader, reference), (hosts[name][0], other))
        ]
        for row, ahead_ns in _set_in_gaps(ours, theirs, places):
            theirs[row:] -= ahead_ns
            for log in hosts[name]:
                _move_from(log, other[keys[row]].step, -ahead_ns)
        fit = fit_clock(ours, theirs)
        if abs(fit.offset_ns) <= fit.error_ns:
            notes.append(
                f"Clock of host {name}: no offset against {names[0]} beyond the error of {fit.error_ns / 1e6:.3f} ms."
            )
            continue
        for log in hosts[name]:
            for step in log.steps:
                step.move(int(fit.correction(np.array([step.start]))[0]))
            _move_samples(log, fit.correction(_times(log)))
        notes.append(
            f"Clock of host {name}: {fit.offset_ns / 1e6:+.3f} ms against {names[0]}, drift {fit.drift * 1e6:+.1f} ppm, corrected by "
            f"{fit.pairs} collectives to within about {max(fit.error_ns, 1e3) / 1e6:.3f} ms."
        )


def _ends(log: RankLog) -> dict[Key, Point]:
    return {point.key: point for point in rank_points(log) if point.root is None}


def _places(log: RankLog, numbers: Sequence[int]) -> NDArray[np.int64]:
    """The block of neighbouring steps to which each of these steps belongs."""
    block = dict(zip((step.number for step in log.steps), blocks(log.steps).tolist(), strict=True))
    return np.array([block[number] for number in numbers], np.int64)


def _set_in_gaps(
    ours: NDArray[np.int64], theirs: NDArray[np.int64], places: Sequence[NDArray[np.int64]]
) -> list[tuple[int, int]]:
    """(row, ns): where steps are missing the wall clock bridges the gap, and one of two clocks was set in it."""
    ahead = theirs - ours
    found = []
    for row in (np.flatnonzero(sum(np.diff(of) != 0 for of in places)) + 1).tolist():
        before, behind = ahead[max(0, row - _BESIDE_GAP) : row], ahead[row : row + _BESIDE_GAP]
        by_ns = int(np.median(behind) - np.median(before))
        apart_ns = float(
            np.median(ours[row : row + _BESIDE_GAP]) - np.median(ours[max(0, row - _BESIDE_GAP) : row])
        )
        if abs(by_ns) > _SET_NS + _MOST_DRIFT * abs(apart_ns):
            found.append((row, by_ns))
    return found


def _move_from(log: RankLog, number: int, ns: int) -> None:
    """Move this step and all behind it."""
    later = [step for step in log.steps if step.number >= number]
    if later:
        begin = later[0].start
        _move_samples(log, np.where(_times(log) >= begin, ns, 0))
    for step in later:
        step.move(ns)


def _times(log: RankLog) -> NDArray[np.int64]:
    return np.array([at for at, _, _ in log.samples], np.int64)


def _move_samples(log: RankLog, by_ns: NDArray[np.int64]) -> None:
    log.samples = [
        (at + ns, user, leaf) for (at, user, leaf), ns in zip(log.samples, by_ns.tolist(), strict=True)
    ]
