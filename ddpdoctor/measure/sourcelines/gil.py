"""Correct samples that waited for the GIL: attribute them to the line that held it.

A sample is due at a random moment, and is taken when the sampling thread gets the GIL. After 5 ms of waiting that thread requests it
(``sys.getswitchinterval``), and the sample then shows the line that held the GIL. If the training thread releases it before, at a call
into torch or the system, the sample shows that call, but the line that held the GIL ran just before. If a preceding line on the same
call path was seen to hold the GIL in other samples, on any rank, the sample is attributed to it; else only the line that ran next (the
*follower*) is known. A call at which the GIL is mostly released by itself never counts as holding it.

Burst samples (taken in close succession) begin to wait when such work begins. The first one of a burst that requests the GIL stands for
the first 5 ms of the work. So do the ordinary samples that show a follower. The larger of the two estimates counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array, Ints, Mask
from ddpdoctor.measure.places import CodeLine, Stack
from ddpdoctor.rundir import HELD_NS

ASKED_NS = 5_000_000
"""Wait after which Python makes the holder release the GIL (``sys.getswitchinterval``), never earlier."""
_BETWEEN_LOOKS_NS = 700_000
"""Time between burst samples in which the sampling thread does not wait for the GIL."""

_LEAST_SEEN = 0.1
"""Least share of requested samples at a call, of those in which it released the GIL by itself. Work of 5.5 ms is requested in one of
ten; work that ends at the request shows the next call now and then."""

_TORCH_FILES = ("/site-packages/torch/", "/dist-packages/torch/")
"""Parts of the paths of torch's files."""
_TORCH = CodeLine(_TORCH_FILES[0], 0, "")
"""Stands for all of torch's lines; torch releases the GIL in every operator."""


class CallStack(msgspec.Struct, frozen=True):
    """Call stack of a sample."""

    lines: Stack
    """The user's."""
    innermost: CodeLine | None
    """Also where it is a library's; None where it is not known."""

    @property
    def in_torch(self) -> bool:
        """Whether the innermost line is torch's."""
        return self.innermost is not None and any(part in self.innermost.file for part in _TORCH_FILES)

    @property
    def whole(self) -> Stack:
        """The user's lines, preceded by the innermost line where that is known and another one."""
        inner, line = self.innermost, self.lines[0]
        if inner in (None, _TORCH) or (inner.file, inner.line) == (line.file, line.line):
            return self.lines
        return (inner, *self.lines)


def moments_of(samples: Ints) -> Ints:
    """[S] epoch ns of the work that each of the ``samples`` [S, 4] is of: the time at which it was due if the GIL was released by
    itself, else the time at which it was taken."""
    held_ns = samples[:, 3]
    return samples[:, 0] - np.where((held_ns >= HELD_NS) & (held_ns < ASKED_NS), held_ns, 0)


class GilOwners(msgspec.Struct, frozen=True):
    """M pairs of a stack and one that holds the GIL just before it."""

    follower: Ints
    """[M] the stack that a sample shows, which did not hold the GIL."""
    owner: Ints
    """[M] the stack that held it before, the likeliest last."""
    share: Array
    """[M] probability of the owner; sums to 1 for each follower."""


def gil_owners_of(
    stacks: dict[CallStack, int], stack: Ints, waited_ns: Ints, in_training: Mask
) -> tuple[Mask, GilOwners]:
    """([S] which samples are of the work before the stack that they show, the likely owners of the GIL there).

    ``stack`` [S] is the stack that each sample of all ranks shows (-1: unknown), after ``waited_ns`` [S]; only samples ``in_training`` [S]
    show owners: what holds the GIL while a job is prepared, such as imports, does not run before the lines of a step. Owners without
    samples are added to ``stacks`` (stack → number).
    """
    holders, releases = _holders_and_releasers(list(stacks), np.where(in_training, stack, -1), waited_ns)
    follows = (waited_ns >= HELD_NS) & ((waited_ns < ASKED_NS) | np.append(releases, False)[stack])
    shown, followers = list(stacks), np.unique(stack[follows & (stack >= 0)])
    numbers = {each: stacks.setdefault(each, len(stacks)) for each in holders}

    @cache
    def before(lines: Stack) -> tuple[Ints, Array]:
        nearest = _before(lines, holders)
        asked = np.array([holders[each] for each in nearest], float)
        return np.array([numbers[each] for each in nearest], np.int64), asked / max(asked.sum(), 1.0)

    found = [before(shown[follower].lines) for follower in followers.tolist()]
    found.append((np.empty(0, np.int64), np.empty(0)))
    owner, share = (np.concatenate(column) for column in zip(*found, strict=True))
    return follows, GilOwners(np.repeat(followers, [len(each) for each, _ in found[:-1]]), owner, share)


def _holders_and_releasers(
    stacks: Sequence[CallStack], stack: Ints, waited_ns: Ints
) -> tuple[dict[CallStack, int], Mask]:
    """(stacks that hold the GIL → samples in which it was requested from them, [K] which of the ``stacks`` release it by themselves).
    All of torch's innermost lines count as one."""
    places: dict[CallStack, int] = {}
    merged = (CallStack(each.lines, _TORCH) if each.in_torch else each for each in stacks)
    place = np.array([places.setdefault(each, len(places)) for each in merged], np.int64)
    asked, following = (
        np.bincount(place[stack[waited & (stack >= 0)]], minlength=len(places))
        for waited in (waited_ns >= ASKED_NS, (waited_ns >= HELD_NS) & (waited_ns < ASKED_NS))
    )
    lines: dict[Stack, int] = {}
    line = np.array([lines.setdefault(each.lines, len(lines)) for each in places], np.int64)
    at_line = np.bincount(line, following)[line]
    releases = (following >= asked) | (asked < _LEAST_SEEN * at_line)
    holders = {each: int(asked[number]) for each, number in places.items() if not releases[number]}
    return holders, releases[place]


def _before(stack: Stack, holders: Mapping[CallStack, int]) -> list[CallStack]:
    """Stacks that hold the GIL just before ``stack``, the likeliest last; [] where none is known."""
    distances = {each: distance for each in holders if (distance := _distance(stack, each.lines)) is not None}
    least = min(distances.values(), default=None)
    return sorted(
        (each for each, distance in distances.items() if distance == least), key=holders.__getitem__
    )


def _distance(follower: Stack, owner: Stack) -> tuple[int, bool, int] | None:
    """Sort key of the distance between two stacks, the nearest lowest: first by the number of common callers, then lines above the
    follower in the same function by distance, then lines below it (as in a loop). None where their order is unknown."""
    common = 0
    for a, b in zip(reversed(follower), reversed(owner), strict=False):
        if (a.file, a.function) != (b.file, b.function):
            break
        if a.line != b.line:
            return -common, b.line > a.line, a.line - b.line
        common += 1
    return (-common, False, 0) if common else None


def begin_wait(taken_ns: Ints, waited_ns: Ints, *others: Ints) -> Mask:
    """[L] which burst samples begin a wait for the GIL, rather than continue the wait of the sample before. A change in any of the
    ``others`` [L] also begins a new one."""
    goes_on = taken_ns[1:] - waited_ns[1:] - taken_ns[:-1] < HELD_NS + _BETWEEN_LOOKS_NS
    for values in others:
        goes_on &= values[1:] == values[:-1]
    return np.append(True, ~goes_on)[: len(taken_ns)]
