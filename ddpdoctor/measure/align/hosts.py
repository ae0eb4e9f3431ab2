"""One clock for the step logs of several hosts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Ints
from ddpdoctor.measure.steplog import Key, RankLog, SyncPoint

from .chronology import blocks
from .clockfit import ClockFit, fit_clock


class Tuning(msgspec.Struct, frozen=True):
    """When two clocks are compared at all, and when one was set where nothing was recorded."""

    fewest: int = 3
    """Collectives that both hosts took part in: of fewer no median tells what is usual."""
    beside_gap: int = 32
    """Collectives on either side of a gap that tell whether a clock was set in it."""
    set_ns: int = 20_000_000
    """Clocks that differ by this much more behind a gap, beyond any drift, were set in it."""
    most_drift: float = 5e-4
    """As which time servers slew a clock at most."""


TUNING = Tuning()


def align_logs(logs: Sequence[RankLog]) -> tuple[list[RankLog], list[str]]:
    """The logs, each on the first host's clock by the ends of the collectives that ranks of both hosts took part in, or of a host
    that shares some with it; and, in sentences, what their clocks are apart."""
    hosts: dict[str, list[RankLog]] = defaultdict(list)
    for log in logs:
        hosts[log.host].append(log)
    if len(hosts) < 2:
        return list(logs), []
    leader, *others = hosts
    own = {host: _Ends.of(of_host) for host, of_host in hosts.items()}
    on_clock = {leader: hosts[leader]}
    corrections: dict[str, _Correction] = {}
    waiting, references = others, [own[leader]]
    while waiting and references:
        found = {}
        for host in waiting:
            tried = (_correction(reference, own[host]) for reference in references)
            if (correction := next(filter(None, tried), None)) is not None:
                found[host] = correction
                on_clock[host] = [correction.applied(log) for log in hosts[host]]
        corrections |= found
        waiting = [host for host in waiting if host not in found]
        references = [_Ends.of(on_clock[host]) for host in found] if waiting else []
    aligned = {
        id(log): moved
        for host, of_host in on_clock.items()
        for log, moved in zip(hosts[host], of_host, strict=True)
    }
    notes = [_told(leader, host, corrections.get(host)) for host in others]
    return [aligned.get(id(log), log) for log in logs], notes


def _told(leader: str, host: str, correction: _Correction | None) -> str:
    if correction is None:
        return (
            f"Hosts {leader} and {host} have no collectives in common: their clocks could not be compared, "
            "and were not aligned."
        )
    fit = correction.fit
    if not correction.tells:
        return f"Clock of host {host}: no offset against {leader} beyond the error of {fit.error_ns / 1e6:.3f} ms."
    return (
        f"Clock of host {host}: {fit.offset_ns / 1e6:+.3f} ms against {leader}, drift {fit.drift * 1e6:+.1f} ppm, corrected by "
        f"{fit.pairs} collectives to within about {max(fit.error_ns, 1e3) / 1e6:.3f} ms."
    )


class _Ends(msgspec.Struct, frozen=True):
    """When a host's ranks left the collectives that all leave together; of each collective, the first of its ranks."""

    points: Mapping[Key, SyncPoint]
    block: Mapping[Key, int]
    """The block of neighbouring steps, on that rank, to which it belongs."""

    @classmethod
    def of(cls, logs: Sequence[RankLog]) -> _Ends:
        points: dict[Key, SyncPoint] = {}
        block: dict[Key, int] = {}
        for log in logs:
            numbers = [step.number for step in log.steps]
            of_step = dict(zip(numbers, blocks(log.steps).tolist(), strict=True))
            for point in log.sync_points:
                if point.root is None and point.key not in points:
                    points[point.key], block[point.key] = point, of_step[point.step]
        return cls(points, block)

    def ends_of(self, keys: Sequence[Key]) -> Ints:
        """[K] epoch ns."""
        return np.array([self.points[key].end_ns for key in keys], np.int64)

    def blocks_of(self, keys: Sequence[Key]) -> Ints:
        """[K] the block of each of these collectives."""
        return np.array([self.block[key] for key in keys], np.int64)


class _Setting(msgspec.Struct, frozen=True):
    """A clock that was set where steps are missing."""

    step: int
    """The first one behind the gap."""
    by_ns: int


class _Correction(msgspec.Struct, frozen=True):
    """What takes the logs of a host to the leader's clock."""

    settings: Sequence[_Setting]
    """Taken back first."""
    fit: ClockFit

    @property
    def tells(self) -> bool:
        """Whether the clocks are further apart than is known."""
        return abs(self.fit.offset_ns) > self.fit.error_ns

    def applied(self, log: RankLog) -> RankLog:
        """A log of this host on the leader's clock."""
        numbers = np.array([step.number for step in log.steps], np.int64)
        starts = np.array([step.start_ns for step in log.steps], np.int64)
        sampled = log.samples[:, 0].copy()
        for setting in self.settings:
            behind = numbers >= setting.step
            if behind.any():
                begin = starts[behind.argmax()]
                sampled -= np.where(sampled >= begin, setting.by_ns, 0)
                starts -= np.where(behind, setting.by_ns, 0)
        if self.tells:
            starts += self.fit.correction(starts)
            sampled += self.fit.correction(sampled)
        recorded = np.array([step.start_ns for step in log.steps], np.int64)
        return log.shifted(starts - recorded, sampled - log.samples[:, 0])


def _correction(reference: _Ends, other: _Ends) -> _Correction | None:
    """By the collectives of two hosts; None where they have too few in common."""
    common = set(reference.points) & set(other.points)
    keys = sorted(common, key=lambda key: reference.points[key].end_ns)
    if len(keys) < TUNING.fewest:
        return None
    ours, theirs = reference.ends_of(keys), other.ends_of(keys)
    edges = (np.diff(reference.blocks_of(keys)) != 0) | (np.diff(other.blocks_of(keys)) != 0)
    settings = []
    for row, by_ns in _set_at(ours, theirs, (np.flatnonzero(edges) + 1).tolist()):
        theirs[row:] -= by_ns
        settings.append(_Setting(other.points[keys[row]].step, by_ns))
    return _Correction(settings, fit_clock(ours, theirs))


def _set_at(ours: Ints, theirs: Ints, edges: Sequence[int]) -> list[tuple[int, int]]:
    """(row, ns) where one of two clocks was set: steps are missing there, and the wall clock bridges the gap."""
    ahead = theirs - ours
    return [(row, by_ns) for row in edges if (by_ns := _set_by(ours, ahead, row))]


def _set_by(ours: Ints, ahead: Ints, row: int) -> int:
    """ns by which a clock was set before this row; 0 where drift explains it."""
    before = slice(max(0, row - TUNING.beside_gap), row)
    behind = slice(row, row + TUNING.beside_gap)
    by_ns = int(np.median(ahead[behind]) - np.median(ahead[before]))
    apart_ns = abs(float(np.median(ours[behind]) - np.median(ours[before])))
    return by_ns if abs(by_ns) > TUNING.set_ns + TUNING.most_drift * apart_ns else 0
