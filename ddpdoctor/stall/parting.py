"""Where ranks left the common order of a process group: the first number under which they called different collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from .calls import Call, Placed
from .order import due

_NEAR = 8
"""Numbers before the first difference: a call from another line that went unnoticed, as sizes happened to agree, is its origin."""
_MOST_STEPS_APART = 1
"""Of calls that belong together: who skips a step's last call is in the next step."""

_Turns = Mapping[int, Mapping[int, Call]]
"""By rank, its calls by number."""


class Parting(msgspec.Struct, frozen=True):
    """The first difference in a group."""

    turn: int
    by_rank: dict[int, Call]
    """What each rank called under this number, as far as it came."""
    odd: tuple[int, ...]
    """Ranks that left the order; all where nothing shows who did."""

    @property
    def is_decided(self) -> bool:
        return len(self.odd) < len(self.by_rank)


def parting(calls: Mapping[int, Sequence[Call]]) -> Parting | None:
    """The first difference, by what each rank wrote down of its last calls; None where they show none.

    Numbers are trusted only where ranks agree on what came before under the same ones, in the same steps: a rank that counts
    otherwise, as it calls ``backward`` more often, has no number in common with others.
    """
    groups = {(call.group, call.members) for each in calls.values() for call in each if call.turn}
    for group in sorted(groups, key=str):
        turns = {
            rank: {call.turn: call for call in each if call.turn and (call.group, call.members) == group}
            for rank, each in calls.items()
        }
        found = _first(turns)
        if found is not None:
            return found
    return None


def _first(turns: _Turns) -> Parting | None:
    held = Counter(turn for each in turns.values() for turn in each)
    agreed: list[dict[int, Call]] = []
    for turn in sorted(turn for turn, ranks in held.items() if ranks > 1):
        there = {rank: each[turn] for rank, each in turns.items() if turn in each}
        if len({call.key for call in there.values()}) > 1 or _of_other_models(there):
            return _judged(turn, there, agreed, turns)
        if _steps_apart(there):
            return None
        agreed.append(there)
    return None


def _of_other_models(there: Mapping[int, Call]) -> bool:
    """Whether ranks stand in backward passes, or broadcasts, of other lines: what DDP moves there is not written down."""
    open_ones = any(not call.returned for call in there.values())
    return (
        open_ones
        and all(call.is_own for call in there.values())
        and len({c.placed for c in there.values()}) > 1
    )


def _judged(
    turn: int, there: dict[int, Call], agreed: Sequence[dict[int, Call]], turns: _Turns
) -> Parting | None:
    ends_there = any(
        not call.returned for each in turns.values() for number, call in each.items() if number >= turn
    )
    if not ends_there or not (agreed or turn == 1) or _steps_apart(there) > _MOST_STEPS_APART:
        return None
    unnoticed = _unnoticed(turn, agreed, turns)
    if unnoticed is not None and unnoticed.is_decided:
        return unnoticed
    return Parting(turn, there, _odd(turn, there, turns))


def _unnoticed(turn: int, agreed: Sequence[dict[int, Call]], turns: _Turns) -> Parting | None:
    """A difference before the first one that matters: the same function and size, from other lines."""
    for count, there in enumerate(agreed):
        if len({call.placed for call in there.values()}) > 1:
            number = next(iter(there.values())).turn or 0
            near = count > 1 and turn - number <= _NEAR
            return Parting(number, there, _odd(number, there, turns)) if near else None
    return None


def _odd(turn: int, there: Mapping[int, Call], turns: _Turns) -> tuple[int, ...]:
    """The ranks that did not call what most did, or what was due by the group's past; all where neither shows that."""
    by_key = len({call.key for call in there.values()}) > 1
    many = Counter(call.key if by_key else call.placed for call in there.values()).most_common()
    if many[0][1] > many[1][1]:
        return tuple(sorted(r for r, c in there.items() if (c.key if by_key else c.placed) != many[0][0]))
    before = {call.placed: set(call.before) for call in there.values()}
    for each in turns.values():
        for number, call in each.items():
            if number <= turn and call.placed in before:
                before[call.placed] |= {number, *call.before}
    usual = due(before, turn) or _due_of_own(turn, there, turns)
    return tuple(sorted(rank for rank, call in there.items() if usual is None or call.placed != usual))


def _due_of_own(turn: int, there: Mapping[int, Call], turns: _Turns) -> Placed | None:
    """The same where DDP issued all of them, by the order of what DDP issues: what the program calls in between comes and goes."""
    if not all(call.is_own for call in there.values()):
        return None
    rank = min(there)
    own = [c.placed for number, c in sorted(turns[rank].items()) if number < turn and c.is_own]
    labels = {call.placed for call in there.values()}
    return due({each: {n for n, label in enumerate(own) if label == each} for each in labels}, len(own))


def _steps_apart(there: Mapping[int, Call]) -> int:
    steps = [call.step for call in there.values() if call.step is not None]
    return max(steps) - min(steps) if steps else 0
