"""All stack samples of a run as one table: time, step, activity of the training thread, and call stack of each sample.

Use :class:`RankSamples` to select rows, and :meth:`Samples.weights` to add up the selected rows by stack.

The sampling thread needs the GIL, so a sample may be taken late; such samples are attributed to the line that held the GIL.

A sample is due at a random moment, and is taken when the sampling thread gets the GIL. After waiting for 5 ms (``sys.getswitchinterval``)
that thread requests the GIL, and then the sample shows the line that held it. If the training thread releases the GIL earlier, at a call
into torch or the system, the sample shows that call, although the line that held the GIL is one that ran just before. If a preceding line
on the same call path held the GIL in other samples, on any rank, the sample is attributed to it; otherwise it stays with the line that it
shows (the *follower*). A call that mostly releases the GIL by itself never counts as holding it.

Burst samples are taken in close succession, so one of them begins to wait as soon as some work takes the GIL. If its wait ends with a
request, it represents the first 5 ms of that work. The ordinary samples that show a follower represent the same 5 ms, so the larger of the
two estimates is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import cache, cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array, Ints, Mask, holds, union
from ddpdoctor.measure.phases import Gap
from ddpdoctor.measure.places import CodeLine, Stack
from ddpdoctor.measure.steplog import WARM_UP_STEPS, RankLog, Step, no_samples
from ddpdoctor.measure.taxonomy import Component
from ddpdoctor.rundir.stepevents import HELD_NS, EventKind

GIL_REQUEST_NS = 5_000_000
"""Wait after which Python makes the thread that holds the GIL release it (``sys.getswitchinterval``)."""
_BURST_PAUSE_NS = 700_000
"""Longest pause between two burst samples if the second did not have to wait for the GIL."""

_MIN_REQUESTED_SHARE = 0.1
"""A call releases the GIL by itself if it has fewer samples that requested the GIL than this share of its line's samples that got it
earlier. Of samples during work of 5.5 ms, one in ten has to request it. Occasional requests prove nothing: if other work ends just at the
request, the sample shows the next call."""

_TORCH_FILES = ("/site-packages/torch/", "/dist-packages/torch/")
"""Parts of the paths of torch's files."""
_HOOK_FILES = "ddpdoctor/hook/"
"""Part of the paths of the hook's own files, such as the one that closes the profiler. Their lines are not work of the job."""
_TORCH = CodeLine(_TORCH_FILES[0], 0, "")
"""Represents all lines of torch: they need not be distinguished, because torch releases the GIL in every operator."""


class CallStack(msgspec.Struct, frozen=True):
    """Call stack of a sample."""

    lines: Stack
    """Lines of the user's code, the innermost first."""
    innermost: CodeLine | None
    """Innermost line, which may be in a library; None if unknown."""

    @property
    def in_torch(self) -> bool:
        """Whether the innermost line is torch's."""
        return self.innermost is not None and any(part in self.innermost.file for part in _TORCH_FILES)

    @property
    def with_innermost(self) -> Stack:
        """The user's lines, preceded by the innermost line if that is known and differs."""
        inner, line = self.innermost, self.lines[0]
        if inner in (None, _TORCH) or (inner.file, inner.line) == (line.file, line.line):
            return self.lines
        return (inner, *self.lines)


def moments_of(samples: Ints) -> Ints:
    """[S] moment of the work that each of the ``samples`` [S, 4] stands for, epoch ns: if the sample waited for the GIL but got it without
    a request, when it was due; otherwise when it was taken."""
    held_ns = samples[:, 3]
    return samples[:, 0] - np.where((held_ns >= HELD_NS) & (held_ns < GIL_REQUEST_NS), held_ns, 0)


class GilOwners(msgspec.Struct, frozen=True):
    """M pairs of stacks: a follower, and an owner that may have held the GIL just before it."""

    follower: Ints
    """[M] the stack that samples show, although it did not hold the GIL."""
    owner: Ints
    """[M] a stack that may have held the GIL just before; of each follower's owners, the likeliest is last."""
    share: Array
    """[M] probability of the owner; sums to 1 for each follower."""

    def take_from(self, following: Array) -> Array:
        """[K] weights that owners get from their followers, by stack. Changes ``following`` [K], the weights of followers: those with
        owners become 0."""
        taken = np.bincount(self.owner, self.share * following[self.follower], len(following))
        following[self.follower] = 0.0
        return taken.astype(float)


def gil_owners_of(
    stacks: dict[CallStack, int], stack: Ints, waited_ns: Ints, in_training: Mask, in_forward: Mask
) -> tuple[Mask, GilOwners]:
    """([S] whether each sample shows a follower, likely owners of the GIL for each follower).

    ``stack`` [S]: stack that each sample of all ranks shows, -1 if unknown; ``waited_ns`` [S]: its wait. Owners are found only from samples
    ``in_training`` [S], because code that holds the GIL during start-up, such as imports, does not run just before the lines of a step.
    Followers in a forward pass (``in_forward`` [S]) have only owners that hold the GIL there, others only owners that hold it elsewhere.
    Owners without samples are added to ``stacks`` (stack → number).
    """
    holders, releases = _holders_and_releasers(list(stacks), np.where(in_training, stack, -1), waited_ns)
    follows = (waited_ns >= HELD_NS) & ((waited_ns < GIL_REQUEST_NS) | np.append(releases, False)[stack])
    shown, followers = list(stacks), np.unique(stack[follows & (stack >= 0)])
    inside = _mostly(stack, in_forward, len(shown))
    held_inside = {_merged(each) for number, each in enumerate(shown) if inside[number]}
    numbers = {each: stacks.setdefault(each, len(stacks)) for each in holders}

    @cache
    def before(lines: Stack, inside: bool) -> tuple[Ints, Array]:
        # An owner with a single sample may belong to followers of both kinds: it is uncertain in which phase its sample was taken.
        nearest = _likely_owners(
            lines, {each: n for each, n in holders.items() if n == 1 or (each in held_inside) == inside}
        )
        asked = np.array([holders[each] for each in nearest], float)
        return np.array([numbers[each] for each in nearest], np.int64), asked / max(asked.sum(), 1.0)

    found = [before(shown[follower].lines, bool(inside[follower])) for follower in followers.tolist()]
    found.append((np.empty(0, np.int64), np.empty(0)))
    owner, share = (np.concatenate(column) for column in zip(*found, strict=True))
    return follows, GilOwners(np.repeat(followers, [len(each) for each, _ in found[:-1]]), owner, share)


def _mostly(stack: Ints, chosen: Mask, count: int) -> Mask:
    """[``count``] whether more than half of the samples of each stack are ``chosen`` [S]."""
    known = stack >= 0
    share: Mask = 2 * np.bincount(stack[known & chosen], minlength=count) > np.bincount(
        stack[known], minlength=count
    )
    return share


def _merged(stack: CallStack) -> CallStack:
    """The stack, with its innermost line replaced by ``_TORCH`` if that is in torch."""
    return CallStack(stack.lines, _TORCH) if stack.in_torch else stack


def _holders_and_releasers(
    stacks: Sequence[CallStack], stack: Ints, waited_ns: Ints
) -> tuple[dict[CallStack, int], Mask]:
    """(stack that holds the GIL → number of its samples for which the GIL was requested, [K] which of the ``stacks`` release it by
    themselves). All innermost lines in torch count as one."""
    places: dict[CallStack, int] = {}
    place = np.array([places.setdefault(_merged(each), len(places)) for each in stacks], np.int64)
    asked, following = (
        np.bincount(place[stack[waited & (stack >= 0)]], minlength=len(places))
        for waited in (waited_ns >= GIL_REQUEST_NS, (waited_ns >= HELD_NS) & (waited_ns < GIL_REQUEST_NS))
    )
    lines: dict[Stack, int] = {}
    line = np.array([lines.setdefault(each.lines, len(lines)) for each in places], np.int64)
    at_line = np.bincount(line, following)[line]
    releases = (following >= asked) | (asked < _MIN_REQUESTED_SHARE * at_line)
    holders = {
        each: int(asked[number])
        for each, number in places.items()
        if not releases[number] and not (each.innermost and _HOOK_FILES in each.innermost.file)
    }
    return holders, releases[place]


def _likely_owners(stack: Stack, holders: Mapping[CallStack, int]) -> list[CallStack]:
    """The ``holders`` nearest to ``stack``, which may have held the GIL just before it, the likeliest last; [] if none is known."""
    distances = {each: distance for each in holders if (distance := _distance(stack, each.lines)) is not None}
    least = min(distances.values(), default=None)
    return sorted(
        (each for each, distance in distances.items() if distance == least), key=holders.__getitem__
    )


def _distance(follower: Stack, owner: Stack) -> tuple[int, bool, int] | None:
    """Sort key of owners, nearest first: those with most common callers; of these, lines above the follower in the same function by
    distance, then lines below it (which run before it in a loop). None if it is unknown which runs first."""
    common = 0
    for a, b in zip(reversed(follower), reversed(owner), strict=False):
        if (a.file, a.function) != (b.file, b.function):
            break
        if a.line != b.line:
            return -common, b.line > a.line, a.line - b.line
        common += 1
    return (-common, False, 0) if common else None


def begin_wait(taken_ns: Ints, waited_ns: Ints, *others: Ints) -> Mask:
    """[L] which burst samples begin a new wait for the GIL; the others were taken in the same wait as the previous sample. A change in any
    of the ``others`` [L], such as the step, also begins a new wait."""
    continues = taken_ns[1:] - waited_ns[1:] - taken_ns[:-1] < HELD_NS + _BURST_PAUSE_NS
    for values in others:
        continues &= values[1:] == values[:-1]
    return np.append(True, ~continues)[: len(taken_ns)]


EVENTS: dict[Component, tuple[EventKind, ...]] = {
    Component.DATA: (EventKind.DATA,),
    Component.EPOCH_START: (EventKind.ITERATION, EventKind.DATA),
    Component.BACKWARD: (EventKind.BACKWARD,),
    Component.OPTIMIZER: (EventKind.OPTIMIZER,),
    Component.COLLECTION: (EventKind.COLLECTION,),
    Component.CHECKPOINT: (EventKind.SAVE,),
}
"""Component → kinds of events that contain its samples, and whose calling line is reported if there are no samples."""
_INSIDE_EVENTS = (
    *dict.fromkeys(kind for kinds in EVENTS.values() for kind in kinds),
    EventKind.COLLECTIVE,
    EventKind.BARRIER,
    EventKind.WAIT,
    EventKind.LOAD,
)
"""Kinds of events during which the thread does not run the job's own Python code between phases. The forward pass is treated separately
(``_FORWARD``)."""
_BITS = {kind.value: 1 << place for place, kind in enumerate((*_INSIDE_EVENTS, EventKind.FORWARD))}
_FORWARD = _BITS[EventKind.FORWARD.value]
_AFTER_COLLECTION_NS = 2_000_000
"""Samples up to this long after a garbage collection count as taken in it. The sampling thread cannot run during a collection, but runs
right afterwards, when the training thread is still at the line that collected."""


def kinds_of(components: Iterable[Component]) -> set[EventKind]:
    """Kinds of events of these components."""
    return {kind for component in components for kind in EVENTS.get(component, ())}


class Kind(IntEnum):
    """Kind of a sample."""

    SEEN = 0
    """Ordinary sample that shows the running line."""
    FOLLOWING = 1
    """Ordinary sample that shows the line after the one that held the GIL."""
    BURST = 2
    """Burst sample that was the first to wait for the GIL during some work, and got it by a request."""


class RankSamples(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Samples of one rank: S rows, of ordinary samples in the order in which they were taken, followed by burst samples; N steps."""

    log: RankLog
    time_ns: Ints
    """[S] moment of the sampled work, epoch ns."""
    step: Ints
    """[S] index of its step in the log; -1 if it is in no step."""
    events: Ints
    """[S] bits of the kinds of events that contain it."""
    stack: Ints
    """[S] index into :attr:`Samples.stacks`; -1 if unknown."""
    kind: Ints
    """[S] a :class:`Kind`."""

    @cached_property
    def numbers(self) -> Ints:
        """[N] numbers of the log's steps."""
        return np.array([step.number for step in self.log.steps], np.int64)

    @cached_property
    def lengths_ns(self) -> Ints:
        """[N] lengths of the log's steps."""
        return np.array([step.length_ns for step in self.log.steps], np.int64)

    @cached_property
    def _gap(self) -> Ints:
        """[S] index of the kind of the gap between phases in which each sample was taken; -1 if in none."""
        return self.log.activities.gaps.kind_at(self.time_ns - self.log.activities.origin_ns)

    @cached_property
    def per_burst(self) -> float:
        """Number of ordinary samples that a burst sample represents: as many as are taken on average in ``GIL_REQUEST_NS``."""
        in_steps = np.count_nonzero((self.step >= 0) & (self.kind != Kind.BURST))
        return GIL_REQUEST_NS * in_steps / max(self.log.burst_ns, 1)

    def steps_of(self, numbers: Collection[int]) -> Mask:
        """[N] mask of the log's steps with these numbers."""
        return np.isin(self.numbers, np.fromiter(numbers, np.int64, len(numbers)))

    def in_steps(self, wanted: Mask) -> Mask:
        """[S] mask of samples in the ``wanted`` [N] steps."""
        inside: Mask = np.append(wanted, False)[self.step]
        return inside

    def while_doing(self, components: Sequence[Component], gap: Gap | None = None) -> Mask:
        """[S] mask of samples taken while the thread did this kind of work, optionally only in gaps of this kind."""
        wanted = sum(_BITS[kind.value] for kind in kinds_of(components))
        inside = self.events & ~_FORWARD
        outside = np.where(
            (self.events & _FORWARD) != 0, Component.FORWARD in components, Component.HOST in components
        )
        chosen: Mask = np.where(inside != 0, (inside & wanted) != 0, outside)
        if gap is not None:
            kinds = self.log.activities.gaps.kinds
            chosen &= self._gap == kinds.index(gap) if gap in kinds else False
        return chosen


class Weights(msgspec.Struct, frozen=True):
    """Weights of selected samples by stack, [K] each; the unit is an ordinary sample."""

    seen: Array
    """Samples that show the running line."""
    before: Array
    """Samples that show a follower, attributed to the stacks that probably held the GIL."""
    following: Array
    """The other samples that show a follower, attributed to the follower, because no owner is known."""
    burst: Array
    """Burst samples, scaled to ordinary ones: another estimate of ``before``."""

    @property
    def without_bursts(self) -> Array:
        """Weight without burst samples."""
        return self.seen + self.before + self.following


class Samples(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Samples of all ranks of a run; K stacks."""

    stacks: list[CallStack]
    """Distinct stacks."""
    ranks: list[RankSamples]
    """By index of the log."""
    gil_owners: GilOwners

    @cached_property
    def outside_torch(self) -> Mask:
        """[K] whether the innermost line is known and outside torch."""
        return np.array([each.innermost is not None and not each.in_torch for each in self.stacks], bool)

    def weights(self, position: int, chosen: Mask | slice = slice(None)) -> Weights:
        """Weights of the ``chosen`` rows of the rank at ``position``."""
        rows, count = self.ranks[position], len(self.stacks)
        kind, stack = rows.kind[chosen], rows.stack[chosen]
        seen, following, bursts = (
            np.bincount(stack[(stack >= 0) & (kind == each)], minlength=count).astype(float) for each in Kind
        )
        before = self.gil_owners.take_from(following)
        return Weights(seen, before, following, bursts * rows.per_burst)

    def by_stack(self, weights: Array, whole: bool = False) -> dict[Stack, float]:
        """Non-zero ``weights`` [K] by call path. Paths are of the user's lines; ``whole``: with the innermost line."""
        found: defaultdict[Stack, float] = defaultdict(float)
        for number in np.flatnonzero(weights).tolist():
            stack = self.stacks[number]
            found[stack.with_innermost if whole else stack.lines] += float(weights[number])
        return found


class _Rows(NamedTuple):
    """Samples of one rank before it is known which of them show followers; S rows, of ordinary samples and then burst samples."""

    rows: Ints
    """[S, 4] as in the log."""
    time_ns: Ints
    step: Ints
    events: Ints
    stack: Ints
    """See :class:`RankSamples`."""


def samples_of(logs: Sequence[RankLog]) -> Samples:
    """Samples of ``logs``, which must be on one clock."""
    stacks: dict[CallStack, int] = {}
    of_ranks = [_rows_of(log, stacks) for log in logs]
    none = no_samples()
    columns = zip(_Rows(none, *[none[:, 0]] * 4), *of_ranks, strict=True)
    every, _, step, events, stack = (np.concatenate(column) for column in columns)
    in_training, in_forward = step >= WARM_UP_STEPS, (events & _FORWARD) != 0
    follows, gil_owners = gil_owners_of(stacks, stack, every[:, 3], in_training, in_forward)
    ends = np.cumsum([len(of_rank.rows) for of_rank in of_ranks])
    parts = zip(logs, of_ranks, np.split(follows, ends)[: len(logs)], strict=True)
    return Samples(list(stacks), [_rank_samples(*part) for part in parts], gil_owners)


def _rows_of(log: RankLog, stacks: dict[CallStack, int]) -> _Rows:
    """The samples of one rank. New stacks are added to ``stacks``."""
    rows = np.concatenate([log.samples, log.burst_samples])
    time_ns = moments_of(rows)
    shown = _stack_numbers(log, rows, stacks)
    return _Rows(rows, time_ns, log.steps_at(time_ns), _event_bits(log.steps, time_ns), shown)


def _stack_numbers(log: RankLog, rows: Ints, stacks: dict[CallStack, int]) -> Ints:
    """[S] number of the stack that each row shows, -1 for none. New stacks are added to ``stacks``."""
    of_user = np.unique(rows[:, 1], return_inverse=True)[1]
    innermost, of_innermost = np.unique(rows[:, 2], return_inverse=True)
    # Combines the positions of the ids, not the ids: these are untrusted input, and two of them may not fit into one number.
    both = of_user * len(innermost) + of_innermost
    _, first, which = np.unique(both, return_index=True, return_inverse=True)
    numbers = np.full(len(first), -1)
    for place in np.argsort(first, kind="stable").tolist():
        user, inner = map(log.sample_where.get, rows[first[place], 1:3].tolist())
        if user is not None:
            stack = CallStack(user.stack, None if inner is None else inner.stack[0])
            numbers[place] = stacks.setdefault(stack, len(stacks))
    return numbers[which]


def _rank_samples(log: RankLog, of_rank: _Rows, follows: Mask) -> RankSamples:
    """Samples of one rank; ``follows`` [S]: whether each shows a follower."""
    rows, time_ns, step, events, stack = of_rank
    bursts = np.arange(len(rows)) >= len(log.samples)
    asked = np.flatnonzero(bursts & ~follows & (step >= 0))
    kept = ~bursts
    kept[asked] = begin_wait(rows[asked, 0], rows[asked, 3], step[asked], events[asked])
    kind = np.where(bursts, Kind.BURST, np.where(follows, Kind.FOLLOWING, Kind.SEEN))
    return RankSamples(log, *(column[kept] for column in (time_ns, step, events, stack, kind)))


def _event_bits(steps: Sequence[Step], moments: Ints) -> Ints:
    """[S] bits of the kinds of events that contain each of the ``moments``. Events are cut at the ends of their step."""
    doing = np.zeros(len(moments), np.int64)
    spans: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for step in steps if len(moments) else ():
        for event in step.events:
            later_ns = _AFTER_COLLECTION_NS if event.kind == EventKind.COLLECTION else 0
            begin, end = step.start_of(event), step.end_of(event) + later_ns
            spans[event.kind].append((max(begin, step.start_ns), min(end, step.end_ns)))
    for kind in spans.keys() & _BITS.keys():
        begins, ends = np.array(spans[kind], np.int64).T
        doing[holds(union(begins, ends), moments)] |= _BITS[kind]
    return doing
