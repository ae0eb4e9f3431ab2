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

from collections.abc import Mapping, Sequence
from functools import cache

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array, Ints, Mask
from ddpdoctor.measure.places import CodeLine, Stack
from ddpdoctor.rundir import HELD_NS

ASKED_NS = 5_000_000
"""Python asks a thread for its lock where another one has waited for so long (``sys.getswitchinterval``), never earlier."""
_BETWEEN_LOOKS_NS = 700_000
"""In which the thread that looks closely does not want the lock."""

_LEAST_SEEN = 0.1
"""Samples in which a call was asked for the lock, of those that it let in by itself: work of 5.5 ms is asked in one of ten, and
what ends as it is asked shows the next call now and then."""

_TORCH_FILES = ("/site-packages/torch/", "/dist-packages/torch/")
"""What the path of a file of torch's contains."""
_TORCH = CodeLine(_TORCH_FILES[0], 0, "")
"""Stands for all of torch's lines, which lets go of the lock in every operator."""


class CallStack(msgspec.Struct, frozen=True):
    """What a sample shows."""

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
        """The innermost line above the user's, where it is another one and known."""
        inner, line = self.innermost, self.lines[0]
        if inner in (None, _TORCH) or (inner.file, inner.line) == (line.file, line.line):
            return self.lines
        return (inner, *self.lines)


def moments_of(samples: Ints) -> Ints:
    """[S] when the thread did what each of the ``samples`` [S, 4] is of, epoch ns: where it is of what ran before the line that
    it shows, when it was due."""
    held_ns = samples[:, 3]
    return samples[:, 0] - np.where((held_ns >= HELD_NS) & (held_ns < ASKED_NS), held_ns, 0)


class GilOwners(msgspec.Struct, frozen=True):
    """Which stacks keep Python's lock just before the program comes to others, M pairs."""

    follower: Ints
    """[M] a stack that is not the one that keeps the lock."""
    owner: Ints
    """[M] one that does before it, the likeliest last."""
    share: Array
    """[M] how likely that is; of a follower's they add up to 1."""


def gil_owners_of(stacks: dict[CallStack, int], stack: Ints, waited_ns: Ints) -> tuple[Mask, GilOwners]:
    """By samples [S] of all ranks, which show these stacks (-1: not known) after so long a wait: which of them are of what ran before,
    and what that was, where any stack was seen to keep the lock. ``stacks``, each with its number, gets gil_owners that no sample shows."""
    keep, lets_go = _seen(list(stacks), stack, waited_ns)
    follows = (waited_ns >= HELD_NS) & ((waited_ns < ASKED_NS) | np.append(lets_go, False)[stack])
    shown, followers = list(stacks), np.unique(stack[follows & (stack >= 0)])
    numbers = {each: stacks.setdefault(each, len(stacks)) for each in keep}

    @cache
    def before(lines: Stack) -> tuple[Ints, Array]:
        nearest = _before(lines, keep)
        asked = np.array([keep[each] for each in nearest], float)
        return np.array([numbers[each] for each in nearest], np.int64), asked / max(asked.sum(), 1.0)

    found = [before(shown[follower].lines) for follower in followers.tolist()]
    found.append((np.empty(0, np.int64), np.empty(0)))
    owner, share = (np.concatenate(column) for column in zip(*found, strict=True))
    return follows, GilOwners(np.repeat(followers, [len(each) for each, _ in found[:-1]]), owner, share)


def _seen(stacks: Sequence[CallStack], stack: Ints, waited_ns: Ints) -> tuple[dict[CallStack, int], Mask]:
    """(The stacks that keep the lock, each with the samples in which they were asked for it; [K] which of the ``stacks`` let go of it by
    themselves.) All of torch's innermost lines are one."""
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
    lets_go = (following >= asked) | (asked < _LEAST_SEEN * at_line)
    keep = {each: int(asked[number]) for each, number in places.items() if not lets_go[number]}
    return keep, lets_go[place]


def _before(stack: Stack, keep: Mapping[CallStack, int]) -> list[CallStack]:
    """What keeps the lock just before the program comes here, the likeliest last; [] where it was never seen."""
    apart = {each: distance for each in keep if (distance := _apart(stack, each.lines)) is not None}
    least = min(apart.values(), default=None)
    return sorted((each for each, distance in apart.items() if distance == least), key=keep.__getitem__)


def _apart(follower: Stack, owner: Stack) -> tuple[int, bool, int] | None:
    """How far before: what the program ran within more calls in common is nearer; then what stands above it in their function, by
    lines, and what stands below it last, as in a loop. None where nothing says which comes first."""
    common = 0
    for a, b in zip(reversed(follower), reversed(owner), strict=False):
        if (a.file, a.function) != (b.file, b.function):
            break
        if a.line != b.line:
            return -common, b.line > a.line, a.line - b.line
        common += 1
    return (-common, False, 0) if common else None


def are_first(taken_ns: Ints, waited_ns: Ints, *others: Ints) -> Mask:
    """[L] which looks begin to wait for the lock, rather than go on with it after the look before; as do those of which any of the
    ``others`` [L] is not as in the look before."""
    goes_on = taken_ns[1:] - waited_ns[1:] - taken_ns[:-1] < HELD_NS + _BETWEEN_LOOKS_NS
    for values in others:
        goes_on &= values[1:] == values[:-1]
    return np.append(True, ~goes_on)[: len(taken_ns)]
