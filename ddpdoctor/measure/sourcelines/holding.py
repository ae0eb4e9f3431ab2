"""Samples that had to wait for Python's lock: whose line was it that kept the lock?

A sample is due at a random moment, and is taken when its thread gets the lock. Where it had to *ask* for that (5 ms), it shows the line
that kept the lock. Where the thread let go of the lock by itself, at a call into torch or the system, the sample shows that call:
what kept the lock ran just before. If a line before it, on the same way through the program, was seen to keep the lock at other times,
on whatever rank, it was that line; else only the line that *follows* is known. A call at which the lock is mostly let go is
taken to keep it never.

Looks in close succession begin to wait when such work begins, and the first of them that has to ask stands for the work's first
5 ms. So do, in all steps, the samples that were followed by a call: the larger of the two counts.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Ints, Mask
from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.rundir import HELD_NS

ASKED_NS = 5_000_000
"""Python asks a thread for its lock where another one has waited for so long (``sys.getswitchinterval``), never earlier."""
_BETWEEN_LOOKS_NS = 700_000
"""In which the thread that looks closely does not want the lock."""

_LEAST_SEEN = 0.1
"""Samples in which a call was asked for the lock, of those that it let in by itself: work of 5.5 ms is asked in one of ten, and
what ends as it is asked shows the next call now and then."""

Stack = tuple[CodeLine, ...]
"""The user's lines, the outermost first."""


TORCH = CodeLine("torch", 0, "")
_TORCH_FILES = ("/site-packages/torch/", "/dist-packages/torch/")
"""What the path of a file of torch's contains."""


class Shown(msgspec.Struct, frozen=True, eq=False):
    """What a sample shows: one object for all samples of all ranks that show the same, so that they are counted as quickly as
    numbers."""

    stack: Stack
    innermost: CodeLine | None
    """Also where it is a library's; ``TORCH`` for all of torch's, which lets go of the lock in every operator."""


def moments_of(samples: Ints) -> Ints:
    """[S] when the thread did what each of the ``samples`` [S, 4] is of, epoch ns: where it is of what ran before the line that
    it shows, when it was due."""
    held_ns = samples[:, 3]
    return samples[:, 0] - np.where((held_ns >= HELD_NS) & (held_ns < ASKED_NS), held_ns, 0)


def lines_in(samples: Ints) -> tuple[list[tuple[int, int]], Ints]:
    """The different pairs of numbers of lines in ``samples`` [S, 4], in the order in which they first are there, and [S] which of
    them each has."""
    of_user = np.unique(samples[:, 1], return_inverse=True)[1]
    innermost, of_innermost = np.unique(samples[:, 2], return_inverse=True)
    # The numbers themselves, which anybody may have written, may be too large to make one of two.
    both = of_user * len(innermost) + of_innermost
    _, first, which = np.unique(both, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return [(user, inner) for user, inner in samples[first[order], 1:3].tolist()], place[which]


def _shown_in(
    log: RankLog, known: dict[tuple[Stack, CodeLine | None], Shown]
) -> dict[tuple[int, int], Shown]:
    """By the numbers of its two lines what a sample of this rank shows, those ``known`` from other ranks or new."""
    lines = {number: CodeLine(at.file, at.line, at.function) for number, at in log.sample_where.items()}
    innermost_lines = {
        number: TORCH if any(t in at.file for t in _TORCH_FILES) else at for number, at in lines.items()
    }
    shown = {}
    for user, innermost in lines_in(np.concatenate([log.samples, log.closer]))[0]:
        if (where := log.sample_where.get(user)) is not None:
            place = (*reversed(where.callers), lines[user]), innermost_lines.get(innermost)
            shown[user, innermost] = known.setdefault(place, Shown(*place))
    return shown


class Holders:
    """The lines that were seen to keep Python's lock, of all ranks of a run."""

    def __init__(self, logs: Sequence[RankLog]) -> None:
        known: dict[tuple[Stack, CodeLine | None], Shown] = {}
        self.shown = {log.rank: _shown_in(log, known) for log in logs}
        """Of each rank, what a sample shows, by the numbers of its two lines."""
        asked: Counter[Shown] = Counter()
        following: Counter[Shown] = Counter()
        for log in logs:
            held = np.concatenate([log.samples, log.closer])
            held = held[held[:, 3] >= HELD_NS]
            has_asked = held[:, 3] >= ASKED_NS
            for counts, rows in ((asked, held[has_asked]), (following, held[~has_asked])):
                pairs, which = lines_in(rows)
                for pair, count in zip(pairs, np.bincount(which).tolist(), strict=True):
                    if (place := self.shown[log.rank].get(pair)) is not None:
                        counts[place] += count
        at_line: Counter[Stack] = Counter()
        for place, count in following.items():
            at_line[place.stack] += count
        self._letting_go = {
            place
            for place in (*following, *asked)
            if following[place] >= asked[place] or asked[place] < _LEAST_SEEN * at_line[place.stack]
        }
        self._keep = {place: count for place, count in asked.items() if place not in self._letting_go}
        self._before: dict[Stack, dict[Shown, float]] = {}

    def follow(self, places: Sequence[Shown], place: Ints, held_ns: Ints) -> Mask:
        """[S] which samples, that waited so long and show these ``places`` (-1: not known), are of what ran before it."""
        letting_go = np.array([*(each in self._letting_go for each in places), False])
        follow: Mask = (held_ns >= HELD_NS) & ((held_ns < ASKED_NS) | letting_go[place])
        return follow

    def before(self, stack: Stack) -> dict[Shown, float]:
        """What keeps the lock just before the program comes here, each place with its share; {} where it was never seen."""
        if stack not in self._before:
            apart = {
                place: distance
                for place in self._keep
                if (distance := _apart(stack, place.stack)) is not None
            }
            least = min(apart.values(), default=None)
            nearest = [place for place, distance in apart.items() if distance == least]
            whole = sum(self._keep[place] for place in nearest)
            self._before[stack] = {place: self._keep[place] / whole for place in nearest}
        return self._before[stack]


def at_holders(logs: Sequence[RankLog]) -> list[RankLog]:
    """The logs of all ranks of a run, with each sample that is of what ran before the line that it shows at the line that most probably
    kept the lock, where any was seen to."""
    if not any((log.samples[:, 3] >= HELD_NS).any() for log in logs):
        return list(logs)
    holders = Holders(logs)
    return [_at_holders(log, holders) for log in logs]


def _at_holders(log: RankLog, holders: Holders) -> RankLog:
    pairs, which = lines_in(log.samples)
    shown = holders.shown[log.rank]
    places = [shown[pair] for pair in pairs if pair in shown]
    known = np.array([pair in shown for pair in pairs], bool)
    place = np.where(known, np.cumsum(known) - 1, -1)[which]
    follow = holders.follow(places, place, log.samples[:, 3]) & (place >= 0)
    samples, where = log.samples.copy(), dict(log.sample_where)
    free = (number for number in itertools.count() if number not in log.sample_where)
    for following in np.unique(place[follow]).tolist():
        before = holders.before(places[following].stack)
        if before:
            holder = max(before, key=before.__getitem__)
            *callers, line = holder.stack
            user = innermost = next(free)
            where[user] = Where(line.file, line.line, line.function, callers=tuple(reversed(callers)))
            if (inner := holder.innermost) not in (None, TORCH, line):
                innermost = next(free)
                where[innermost] = Where(inner.file, inner.line, inner.function)
            samples[follow & (place == following), 1:3] = user, innermost
    return replace(log, samples=samples, sample_where=where)


class Held(msgspec.Struct, frozen=True):
    """Samples of one rank: how many are of which line."""

    holders: Holders
    at: Counter[Shown]
    """Samples of random moments, by the place that they show and are of."""
    following: Counter[Shown]
    """Those that are of what ran before the place that they show."""
    looked: dict[Shown, float] = msgspec.field(default_factory=dict)
    """First looks that had to ask, in samples of random moments."""

    def close_looks(self, places: Sequence[Shown], taken_ns: Ints, held_ns: Ints, per_ns: float) -> None:
        """Count looks that had to ask at these ``places``, in their order. ``per_ns``: samples of random moments per ns of
        looking closely."""
        since_ns = taken_ns[1:] - held_ns[1:] - taken_ns[:-1]
        goes_on = [False, *(since_ns < HELD_NS + _BETWEEN_LOOKS_NS).tolist()]
        for place, same in zip(places, goes_on, strict=False):
            if not same:
                self.looked[place] = self.looked.get(place, 0.0) + ASKED_NS * per_ns

    def settled(self) -> tuple[dict[Shown, float], dict[Shown, float]]:
        """(Samples by the place that they are of, those of which only the place is known that follows.)"""
        before: dict[Shown, float] = {}
        unknown: dict[Shown, float] = {}
        for place, count in self.following.items():
            shares = self.holders.before(place.stack)
            for holder, share in shares.items():
                before[holder] = before.get(holder, 0.0) + count * share
            if not shares:
                unknown[place] = count
        places = dict.fromkeys((*self.at, *self.looked, *before))
        at = {
            place: self.at.get(place, 0) + max(self.looked.get(place, 0.0), before.get(place, 0.0))
            for place in places
        }
        return at, unknown


def _apart(follower: Stack, holder: Stack) -> tuple[int, bool, int] | None:
    """How far before: what the program ran within more calls in common is nearer; then what stands above it in their function, by
    lines, and what stands below it last, as in a loop. None where nothing says which comes first."""
    common = 0
    for a, b in zip(follower, holder, strict=False):
        if (a.file, a.function) != (b.file, b.function):
            break
        if a.line != b.line:
            return -common, b.line > a.line, a.line - b.line
        common += 1
    return (-common, False, 0) if common else None
