"""Compares the ranks' call logs: the first difference in a process group, and the call that was due there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any, TypeVar

import msgspec

from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.rundir.stepevents import (
    POINT_TO_POINT,
    CallField,
    EventField,
    EventKind,
    LineField,
    Phase,
    groups_with_open,
)

from .recording import GroupKey

GRADIENTS = "all_reduce of gradients"
_DDP_COLLECTIVES = {EventKind.BACKWARD.value: GRADIENTS, EventKind.BROADCAST.value: "broadcast of buffers"}
"""Kind of event → collective that DDP issues itself."""
_EQUAL_INPUTS = frozenset(
    [
        "all_reduce",
        "all_reduce_coalesced",
        "broadcast",
        "reduce",
        "all_gather",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    ]
)
"""Functions whose inputs must have the same size on all ranks."""
_BACKWARD_FILES = ("/torch/autograd/graph.py", "/torch/autograd/__init__.py")

_Key = tuple[str, str, float | None]
"""(group, function, bytes), which must be equal on all ranks."""
_Line = tuple[str, int] | None
PlacedKey = tuple[_Key, _Line]
"""The key and the calling line."""


class Call(msgspec.Struct, frozen=True):
    """A collective that a rank called."""

    operation: str
    group: str
    size_bytes: float | None
    """Size of its input; None if it may differ by rank."""
    where: Where | None
    returned: bool
    step: int | None = None
    turn: int | None = None
    """Its number in the group; None if unknown."""
    before: tuple[int, ...] = ()
    """Numbers of the last earlier calls from the same line with the same size."""
    dtype: str | None = None
    members: tuple[int, ...] | None = None
    """Ranks of the group; None if unknown."""
    is_by_ddp: bool = False
    """Whether DDP issued it."""

    @property
    def key(self) -> _Key:
        return self.group, self.operation, self.size_bytes

    @property
    def placed_key(self) -> PlacedKey:
        """The key and the calling line."""
        return self.key, None if self.where is None else (self.where.file, self.where.line)

    @property
    def words(self) -> str:
        if self.size_bytes is None:
            return self.operation
        typed = f" ({self.dtype})" if self.dtype else ""
        return f"{self.operation} of {self.size_bytes:,.0f} bytes{typed}"


def calls_of(
    rows: Sequence[Mapping[str, Any]], log: RankLog | None, groups: Mapping[str, GroupKey]
) -> tuple[Call, ...]:
    """The calls in ``calls.jsonl``, in order. ``groups``: the rank's known groups by name."""
    found = (_call_from_row(row, {} if log is None else log.where, groups) for row in rows)
    return tuple(call for call in found if call is not None)


def with_open_calls(calls: Sequence[Call], groups: object) -> tuple[Call, ...]:
    """``calls``, with the last one of each group marked as not returned if the group has an open collective: on a device, a call returns
    once it is enqueued, and collectives of a group are completed in order. ``groups``: as reported by the rank."""
    last = {call.group: number for number, call in enumerate(calls)}
    open_ones = {last.get(name) for name in groups_with_open(groups)}
    return tuple(
        msgspec.structs.replace(call, returned=False) if number in open_ones else call
        for number, call in enumerate(calls)
    )


def _call_from_row(
    row: Mapping[str, Any], places: Mapping[int, Where], groups: Mapping[str, GroupKey]
) -> Call | None:
    own = _DDP_COLLECTIVES.get(str(row.get(EventField.KIND.value)))
    operation = own or str(row.get(EventField.OPERATION.value) or "")
    if operation in POINT_TO_POINT or not operation:
        return None
    group = str(row.get(EventField.GROUP.value) or "")
    before = (row.get(CallField.LAST_TURN.value), row.get(CallField.TURN_BEFORE.value))
    return Call(
        operation,
        group,
        row.get(EventField.MESSAGE_BYTES.value) if operation in _EQUAL_INPUTS else None,
        places.get(row.get(EventField.WHERE.value, -1)),
        row.get(CallField.OPEN.value) == 0,
        step=row.get(LineField.STEP.value),
        turn=row.get(CallField.TURN.value),
        before=tuple(turn for turn in before if turn),
        dtype=row.get(CallField.DTYPE.value),
        members=groups[group].members if group in groups else None,
        is_by_ddp=own is not None,
    )


def in_backward(phase: str | None, stack: Sequence[CodeLine]) -> bool:
    """Whether a rank is in a backward pass."""
    return phase == Phase.BACKWARD or any(line.file.endswith(_BACKWARD_FILES) for line in stack)


Label = TypeVar("Label", bound=Hashable)


class _Turn(Enum):
    """Whether a collective is due at a number, judged by its earlier numbers."""

    DUE = "due"
    """It mostly recurred at this distance."""
    OUT = "out"
    """At this distance, another collective mostly came."""
    NEVER = "never"
    """It was never called before."""
    UNKNOWN = "unknown"


def due(before: Mapping[Label, Collection[int]], number: int) -> Label | None:
    """The collective that is due as ``number`` of the group, among those that ranks called; None if undecided. ``before``: the lower
    numbers at which each was called.

    The collective with the largest distance to its last call decides: one that comes at every twentieth number is due there,
    although another one comes at most numbers.
    """
    past = {label: sorted(each for each in numbers if each < number) for label, numbers in before.items()}
    turns = {label: _turn(numbers, number) for label, numbers in past.items()}
    open_ones = [label for label, turn in turns.items() if turn in (_Turn.DUE, _Turn.UNKNOWN)]
    if not open_ones:
        return None
    distances = {label: number - past[label][-1] for label in open_ones}
    farthest = [label for label in open_ones if distances[label] == max(distances.values())]
    if len(farthest) > 1:
        return None
    # A single earlier call (as DDP's own at its construction) and a new collective show no order.
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


_MAX_ORIGIN_DISTANCE = 8
"""A difference in calling lines (same function and size) at most this many calls before the first different key is its origin."""
_MOST_STEPS_APART = 1
"""Most steps between calls that belong together: a rank that skips the last call of a step is in the next step."""

_Turns = Mapping[int, Mapping[int, Call]]
"""Rank → its calls by number."""


class CallDifference(msgspec.Struct, frozen=True):
    """The first difference in a group."""

    turn: int
    by_rank: dict[int, Call]
    """The call with this number by rank, for the ranks that reached it."""
    odd: tuple[int, ...]
    """Ranks that left the order; all ranks if undecided."""

    @property
    def is_decided(self) -> bool:
        return len(self.odd) < len(self.by_rank)


def first_call_difference(calls: Mapping[int, Sequence[Call]]) -> CallDifference | None:
    """The first difference in the ranks' call logs; None if they show none.

    Numbers are compared only if the ranks agree on earlier calls of the same numbers, in the same steps: a rank that calls ``backward``
    more often has other numbers.
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


def _first(turns: _Turns) -> CallDifference | None:
    held = Counter(turn for each in turns.values() for turn in each)
    agreed: list[dict[int, Call]] = []
    for turn in sorted(turn for turn, ranks in held.items() if ranks > 1):
        by_rank = {rank: each[turn] for rank, each in turns.items() if turn in each}
        if len({call.key for call in by_rank.values()}) > 1 or _are_of_different_models(by_rank):
            return _difference_at(turn, by_rank, agreed, turns)
        if _steps_apart(by_rank):
            return None
        agreed.append(by_rank)
    return None


def _are_of_different_models(by_rank: Mapping[int, Call]) -> bool:
    """Whether ranks are in backward passes or broadcasts at different lines. The sizes of DDP's own collectives are not recorded."""
    open_ones = any(not call.returned for call in by_rank.values())
    return (
        open_ones
        and all(call.is_by_ddp for call in by_rank.values())
        and len({c.placed_key for c in by_rank.values()}) > 1
    )


def _difference_at(
    turn: int, by_rank: dict[int, Call], agreed: Sequence[dict[int, Call]], turns: _Turns
) -> CallDifference | None:
    is_open_after = any(
        not call.returned for each in turns.values() for number, call in each.items() if number >= turn
    )
    if not is_open_after or not (agreed or turn == 1) or _steps_apart(by_rank) > _MOST_STEPS_APART:
        return None
    earlier = _earlier_line_difference(turn, agreed, turns)
    if earlier is not None and earlier.is_decided:
        return earlier
    return CallDifference(turn, by_rank, _odd_ranks(turn, by_rank, turns))


def _earlier_line_difference(
    turn: int, agreed: Sequence[dict[int, Call]], turns: _Turns
) -> CallDifference | None:
    """An earlier difference: same function and size, different calling lines."""
    for count, by_rank in enumerate(agreed):
        if len({call.placed_key for call in by_rank.values()}) > 1:
            number = next(iter(by_rank.values())).turn or 0
            near = count > 1 and turn - number <= _MAX_ORIGIN_DISTANCE
            return CallDifference(number, by_rank, _odd_ranks(number, by_rank, turns)) if near else None
    return None


def _odd_ranks(turn: int, by_rank: Mapping[int, Call], turns: _Turns) -> tuple[int, ...]:
    """Ranks that deviate from the majority, or from the call that was due by the group's past; all ranks if undecided."""
    by_key = len({call.key for call in by_rank.values()}) > 1
    many = Counter(call.key if by_key else call.placed_key for call in by_rank.values()).most_common()
    if many[0][1] > many[1][1]:
        return tuple(
            sorted(r for r, c in by_rank.items() if (c.key if by_key else c.placed_key) != many[0][0])
        )
    before = {call.placed_key: set(call.before) for call in by_rank.values()}
    for each in turns.values():
        for number, call in each.items():
            if number <= turn and call.placed_key in before:
                before[call.placed_key] |= {number, *call.before}
    usual = due(before, turn) or _due_ddp_call(turn, by_rank, turns)
    return tuple(sorted(rank for rank, call in by_rank.items() if usual is None or call.placed_key != usual))


def _due_ddp_call(turn: int, by_rank: Mapping[int, Call], turns: _Turns) -> PlacedKey | None:
    """The due call if DDP issued all of them, by the order of DDP's own collectives; the program's calls in between vary."""
    if not all(call.is_by_ddp for call in by_rank.values()):
        return None
    rank = min(by_rank)
    own = [c.placed_key for number, c in sorted(turns[rank].items()) if number < turn and c.is_by_ddp]
    labels = {call.placed_key for call in by_rank.values()}
    return due({each: {n for n, label in enumerate(own) if label == each} for each in labels}, len(own))


def _steps_apart(by_rank: Mapping[int, Call]) -> int:
    steps = [call.step for call in by_rank.values() if call.step is not None]
    return max(steps) - min(steps) if steps else 0
