"""The order in which a process group calls its collectives: which of several was due at a number, by the group's own past."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from typing import TypeVar

Label = TypeVar("Label", bound=Hashable)


class _Turn(Enum):
    """What the numbers at which a collective was called before say of one more number."""

    DUE = "due"
    """It came again after just as many others."""
    OUT = "out"
    """After as many others, something else came."""
    NEVER = "never"
    """It was never called before."""
    UNKNOWN = "unknown"


def due(before: Mapping[Label, Collection[int]], number: int) -> Label | None:
    """Of the collectives that ranks called as ``number`` of their group, the one that the group's past has there; None if it does not
    show that. ``before``: the numbers, below it, at which each was called.

    What comes every twentieth time is due at its twentieth, though something else comes in most places: the collective with the
    longer way back to its last call decides, and if nothing is known of that one, nothing is.
    """
    past = {label: sorted(each for each in numbers if each < number) for label, numbers in before.items()}
    turns = {label: _turn(numbers, number) for label, numbers in past.items()}
    open_ones = [label for label, turn in turns.items() if turn in (_Turn.DUE, _Turn.UNKNOWN)]
    if not open_ones:
        return None
    far = {label: number - past[label][-1] for label in open_ones}
    farthest = [label for label in open_ones if far[label] == max(far.values())]
    if len(farthest) > 1:
        return None
    # One call before, as DDP's own at its construction, and another collective that is new: that shows no order.
    shown = len(past[farthest[0]]) > 1 or _Turn.NEVER not in turns.values()
    alone = len(open_ones) == 1 and len(turns) > 1 and shown
    return farthest[0] if alone or turns[farthest[0]] is _Turn.DUE else None


def _turn(past: Sequence[int], number: int) -> _Turn:
    if not past:
        return _Turn.NEVER
    far = number - past[-1]
    gaps = [later - earlier for earlier, later in pairwise(past)]
    came, passed = sum(gap == far for gap in gaps), sum(gap > far for gap in gaps)
    if came == passed:
        return _Turn.UNKNOWN
    return _Turn.DUE if came > passed else _Turn.OUT
