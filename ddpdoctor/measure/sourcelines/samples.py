"""Counting stack samples: at which of the user's lines the training thread was while it did some kind of work."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import sqrt

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Ints, Mask
from ddpdoctor.measure.phases import Gap
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.taxonomy import IN_GAPS, Component
from ddpdoctor.rundir import HELD_NS

from .callers import Path, heaviest_of
from .fewsamples import most_likely
from .holding import TORCH, Held, Holders, Shown
from .ranking import Frame, frame_of
from .taken import Taken

_COUNTING_SIGMAS = 2.0
"""Counts scatter by their square root: a line stands out by twice that."""


class SampleCounts(msgspec.Struct, frozen=True):
    """Samples of some ranks in some steps; a sample that may be of an operator counts for less than one."""

    at: Mapping[Frame, float]
    """In the components' time, by line."""
    outside: Mapping[Frame, float]
    """Those of them whose innermost frame is not torch's."""
    behind: Mapping[Frame, float]
    """Those of which only the line is known that follows, see :mod:`.holding`."""
    paths: Mapping[Frame, Mapping[Path, float]]
    """Those at each line, by the lines that called it."""
    samples: int
    """In the components' time, on all lines."""
    taken: int
    """Whatever the thread did."""
    seconds: float
    steps: int
    """Steps times ranks looked at."""


class Samples:
    """Those of one rank, ready to be counted for any cause."""

    def __init__(self, log: RankLog, holders: Holders) -> None:
        self._holders = holders
        self._looked_ns = log.looked_ns
        self._numbers = np.array([step.number for step in log.steps], np.int64)
        self._lengths_ns = np.array([step.length_ns for step in log.steps], np.int64)
        self._random = Taken(log, log.samples, holders)
        self._close = Taken(log, log.closer, holders)
        self._random_follow, self._close_follow = (
            holders.follow(of.places, of.place, of.held_ns) for of in (self._random, self._close)
        )

    def counted(self, wanted: Ints, components: Sequence[Component], gap: Gap | None) -> _Counted:
        """Those of the ``wanted`` steps, in gaps of this kind where it is given."""
        steps = np.isin(self._numbers, wanted)
        length_ns = int(self._lengths_ns[steps].sum())
        chosen, taken = self._chosen(self._random, steps, components, gap)
        following = self._random_follow
        held = Held(
            self._holders,
            _by_place(self._random, chosen & ~following),
            _by_place(self._random, chosen & following),
        )
        if self._looked_ns:
            looked_ns = self._looked_ns * (max(length_ns, 1) / max(int(self._lengths_ns.sum()), 1))
            looks, _ = self._chosen(self._close, steps, components, gap)
            looks &= (self._close.held_ns >= HELD_NS) & ~self._close_follow
            held.close_looks(
                [self._close.places[place] for place in self._close.place[looks].tolist()],
                self._close.taken_ns[looks],
                self._close.held_ns[looks],
                taken / looked_ns,
            )
        return _Counted(held, int(chosen.sum()), taken, length_ns, int(steps.sum()))

    def _chosen(
        self, samples: Taken, steps: Mask, components: Sequence[Component], gap: Gap | None
    ) -> tuple[Mask, int]:
        """[S] those that count; how many were taken in these steps, whatever the thread did."""
        within = steps[samples.step]
        chosen = within & samples.while_doing(components) & (samples.place >= 0)
        if gap is not None:
            chosen &= samples.in_gap(gap)
        return chosen, int(within.sum())


class _Counted(msgspec.Struct, frozen=True):
    """Samples of one rank, for one cause."""

    held: Held
    samples: int
    """In the components' time, on all lines."""
    taken: int
    """Whatever the thread did."""
    length_ns: int
    """Of the steps looked at."""
    steps: int


def _by_place(samples: Taken, chosen: Mask) -> Counter[Shown]:
    """How many of the ``chosen`` show each place, in the order in which they first do."""
    places, first, counts = np.unique(samples.place[chosen], return_index=True, return_counts=True)
    order = np.argsort(first, kind="stable")
    found: Counter[Shown] = Counter()
    for place, count in zip(places[order].tolist(), counts[order].tolist(), strict=True):
        found[samples.places[place]] += count  # two pairs of lines may show the same
    return found


def counted(
    ranks: Sequence[tuple[RankLog, Samples]],
    components: Sequence[Component],
    wanted: set[int],
    python_parts: Mapping[int, Mapping[int, float]],
    holders: Holders,
    gap: Gap | None = None,
) -> SampleCounts:
    """Count the samples of the ``wanted`` steps, those of one ``gap`` between phases where it is given. ``python_parts``: by
    rank and line, how much a sample counts for where Python work is meant, and no operators; ``holders``: those of all ranks."""
    tally = _Tally()
    count, taken, seconds, steps = 0, 0, 0.0, 0
    only_python = Component.HOST in components and set(components).isdisjoint(IN_GAPS)
    numbers = np.fromiter(wanted, np.int64, len(wanted))
    for log, samples in ranks:
        of_rank = samples.counted(numbers, components, gap)
        count += of_rank.samples
        taken += of_rank.taken
        seconds += of_rank.length_ns / 1e9
        steps += of_rank.steps
        parts = python_parts[log.rank] if only_python else {}
        shown = holders.shown[log.rank]
        _tell(of_rank.held, tally, {shown[key]: parts[key[0]] for key in shown if key[0] in parts})
    return SampleCounts(tally.at, tally.outside, tally.behind, tally.paths, count, taken, seconds, steps)


class _Tally(msgspec.Struct, frozen=True):
    """Samples by line, while they are counted."""

    at: defaultdict[Frame, float] = msgspec.field(default_factory=lambda: defaultdict(float))
    outside: defaultdict[Frame, float] = msgspec.field(default_factory=lambda: defaultdict(float))
    behind: defaultdict[Frame, float] = msgspec.field(default_factory=lambda: defaultdict(float))
    paths: defaultdict[Frame, defaultdict[Path, float]] = msgspec.field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )


def _tell(held: Held, tally: _Tally, parts: Mapping[Shown, float]) -> None:
    """Put one rank's samples where they belong."""
    for counts, lines in zip(held.settled(), (tally.at, tally.behind), strict=True):
        for place, count in counts.items():
            frame, weight = frame_of(place.stack[-1]), count * parts.get(place, 1.0)
            lines[frame] += weight
            tally.paths[frame][place.stack[-2::-1]] += weight
            if lines is tally.at and place.innermost not in (None, TORCH):
                tally.outside[frame] += weight


def common_of(together: SampleCounts, each: Sequence[SampleCounts]) -> SampleCounts:
    """Counts of all ranks ``together``, of each rank no more at a line than the (lower) median rank has there, but for the
    counting error: what one rank does more is not common."""
    at: dict[Frame, float] = {}
    outside: dict[Frame, float] = {}
    for frame, kept in _kept(each).items():
        at[frame] = sum(part * counts.at.get(frame, 0.0) for part, counts in zip(kept, each, strict=True))
        outside[frame] = sum(
            part * counts.outside.get(frame, 0.0) for part, counts in zip(kept, each, strict=True)
        )
    return replace(together, at=at, outside=outside)


def same_lines(each: Sequence[SampleCounts]) -> float:
    """Part of what the ranks have alike that lies at lines which all have: of each rank no more counts than the (lower) median
    rank has."""
    wholes = [sum(counts.at.values()) for counts in each]
    middle = sorted(wholes)[(len(each) - 1) // 2]
    kept = _kept(each)
    same = [
        sum(parts[rank] * counts.at.get(frame, 0.0) for frame, parts in kept.items())
        for rank, counts in enumerate(each)
    ]
    alike = [min(whole, middle) for whole in wholes]
    return min(1.0, sum(map(min, same, alike)) / max(sum(alike), 1e-9))


def _kept(each: Sequence[SampleCounts]) -> dict[Frame, list[float]]:
    """Part of each rank's samples at a line that is common to the ranks."""
    kept: dict[Frame, list[float]] = {}
    for frame in dict.fromkeys(frame for counts in each for frame in counts.at):
        own = [counts.at.get(frame, 0.0) for counts in each]
        middle = sorted(own)[(len(each) - 1) // 2]
        most = middle + _COUNTING_SIGMAS * sqrt(middle) + 1.0
        kept[frame] = [min(1.0, most / count) if count else 0.0 for count in own]
    return kept


def beyond(mine: SampleCounts, theirs: SampleCounts, fewest: int) -> dict[Frame, float]:
    """Samples at each line beyond those of other ranks in as much time, where they stand out of the counting error, and are
    ``fewest`` at least; where there is none, at the line that is most likely what these ranks do more; else at the lines that
    follow."""
    scale = scale_of(mine, theirs)
    return (
        _net(mine.at, theirs.at, scale, fewest)
        or most_likely(mine.at, theirs.at, scale)
        or _net(mine.behind, theirs.behind, scale, fewest)
    )


def _net(
    mine: Mapping[Frame, float], theirs: Mapping[Frame, float], scale: float, fewest: int
) -> dict[Frame, float]:
    net: dict[Frame, float] = {}
    for frame, count in mine.items():
        other = theirs.get(frame, 0.0)
        if count - scale * other >= max(fewest, _COUNTING_SIGMAS * sqrt(count + scale**2 * other)):
            net[frame] = count - scale * other
    return net


def callers_of(frame: Frame, mine: SampleCounts, theirs: SampleCounts) -> tuple[Path, int]:
    """The way to a line that has most samples beyond those of other ranks, and how many others there are."""
    scale = scale_of(mine, theirs)
    other = theirs.paths.get(frame, {})
    net = {path: count - scale * other.get(path, 0.0) for path, count in mine.paths.get(frame, {}).items()}
    return heaviest_of(net, other)


def scale_of(mine: SampleCounts, theirs: SampleCounts) -> float:
    """By which other ranks' samples are multiplied to be those of as much time; 0 without any."""
    return mine.seconds / theirs.seconds if theirs.seconds else 0.0
