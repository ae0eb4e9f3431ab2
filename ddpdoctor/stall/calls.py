"""What each rank had called when the job ended, from Python or by DDP, as it wrote down itself: where ranks called what does not fit
together, Gloo ends one of them on the spot, and no flight recorder is left to ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.rundir import CALL_SLOTS, CallField, EventField, EventKind, LineField
from ddpdoctor.rundir.phases import Phase

from .recording import GroupKey

GRADIENTS = "all_reduce of gradients"
"""What a rank calls that stands in a backward pass."""
_OWN = {EventKind.BACKWARD.value: GRADIENTS, EventKind.BROADCAST.value: "broadcast of buffers"}
"""What DDP issues itself, by the event in which it does."""
_INPUTS_ALIKE = frozenset(
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
"""Functions to which all ranks must bring as many bytes."""
_MESSAGES = frozenset(
    ["send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"]
)
"""Those that two ranks call, each another one."""
_OF_CALLS = (EventKind.COLLECTIVE, EventKind.BARRIER)
_BACKWARD_FILES = ("/torch/autograd/graph.py", "/torch/autograd/__init__.py")

_Key = tuple[str, str, float | None]
"""Group, function and bytes: what must be the same on all ranks."""
_Line = tuple[str, int] | None
Placed = tuple[_Key, _Line]
"""The same, and the line that called."""


class Call(msgspec.Struct, frozen=True):
    """A collective that a rank called."""

    operation: str
    group: str
    size_bytes: float | None
    """What it brought; None where that need not be the same on all ranks."""
    where: Where | None
    returned: bool
    step: int | None = None
    turn: int | None = None
    """Its number in the group; None in recordings that do not count."""
    before: tuple[int, ...] = ()
    """The same of this call, from the same line with as many bytes, the last times before."""
    dtype: str | None = None
    members: tuple[int, ...] | None = None
    """Ranks of the group; None where they are not known."""
    is_own: bool = False
    """Whether DDP issued it."""

    @property
    def key(self) -> _Key:
        return self.group, self.operation, self.size_bytes

    @property
    def placed(self) -> Placed:
        """The key, and the line that called."""
        return self.key, None if self.where is None else (self.where.file, self.where.line)

    @property
    def words(self) -> str:
        if self.size_bytes is None:
            return self.operation
        typed = f" ({self.dtype})" if self.dtype else ""
        return f"{self.operation} of {self.size_bytes:,.0f} bytes{typed}"


def _call(operation: str, group: str, size: float | None, where: Where | None, returned: bool) -> Call | None:
    if operation in _MESSAGES or not operation:
        return None
    return Call(operation, group, size if operation in _INPUTS_ALIKE else None, where, returned)


def calls_of(
    rows: Sequence[Mapping[str, Any]], log: RankLog | None, groups: Mapping[str, GroupKey]
) -> tuple[Call, ...]:
    """Of ``calls.jsonl``, the first one first. ``groups``: those that the rank is known to be in, by name."""
    found = (_called(row, {} if log is None else log.where, groups) for row in rows)
    return tuple(call for call in found if call is not None)


def _called(
    row: Mapping[str, Any], places: Mapping[int, Where], groups: Mapping[str, GroupKey]
) -> Call | None:
    own = _OWN.get(str(row.get(EventField.KIND.value)))
    group = str(row.get(EventField.GROUP.value) or "")
    call = _call(
        own or str(row.get(EventField.OPERATION.value) or ""),
        group,
        row.get(EventField.MESSAGE_BYTES.value),
        places.get(row.get(EventField.WHERE.value, -1)),
        row.get(CallField.OPEN.value) == 0,
    )
    if call is None:
        return None
    before = (row.get(CallField.LAST_TURN.value), row.get(CallField.TURN_BEFORE.value))
    return msgspec.structs.replace(
        call,
        step=row.get(LineField.STEP.value),
        turn=row.get(CallField.TURN.value),
        before=tuple(turn for turn in before if turn),
        dtype=row.get(CallField.DTYPE.value),
        members=groups[group].members if group in groups else None,
        is_own=own is not None,
    )


class Usual(msgspec.Struct, frozen=True):
    """What ranks called in steps that are over."""

    sequences: frozenset[tuple[Placed, ...]]
    backward_at: Where | None
    """The line that most backward passes were called from."""

    def knows(self, calls: Sequence[Call]) -> bool:
        """Whether a step began with these calls; had them at all, where there may have been more before them."""
        wanted = tuple(call.placed for call in calls)
        many = len(wanted)
        for known in self.sequences:
            starts = range(len(known) - many + 1) if many >= CALL_SLOTS else range(1)
            if any(known[start : start + many] == wanted for start in starts):
                return True
        return False

    def has_both(self, one: Call, other: Call) -> bool:
        """Whether both were called in one step."""
        return any({one.key, other.key} <= {key for key, _ in known} for known in self.sequences)


def usual_calls(logs: Sequence[RankLog]) -> Usual:
    """Of all steps of which the events were recorded."""
    sequences = set()
    lines: Counter[Where] = Counter()
    for log in logs:
        for step in log.steps:
            if not step.events:
                continue
            made = (
                _call(event.operation, event.group, event.message_bytes, log.where.get(event.where), True)
                for event in sorted(step.events, key=lambda event: event.start_ns)
                if event.kind in _OF_CALLS
            )
            sequences.add(tuple(call.placed for call in made if call is not None))
            lines.update(
                log.where[event.where]
                for event in step.events
                if event.kind == EventKind.BACKWARD and event.where in log.where
            )
    return Usual(frozenset(sequences), lines.most_common(1)[0][0] if lines else None)


def in_backward(phase: str | None, stack: Sequence[CodeLine]) -> bool:
    """Whether a rank stands in a backward pass."""
    return phase == Phase.BACKWARD or any(line.file.endswith(_BACKWARD_FILES) for line in stack)


def gradients(where: Where | None) -> Call:
    """What a rank calls that stands in a backward pass at ``where``."""
    return Call(GRADIENTS, "0", None, where, False)


def disagreeing(
    by_rank: Mapping[int, Sequence[Call]], pending: Mapping[int, Call], usual: Usual
) -> list[int]:
    """The ranks whose calls of one step do not go with those of the others; all of them where nothing tells who is at fault, none
    where all go together. ``pending``: what each of them had not returned from."""
    if len({call.key for call in pending.values()}) < 2 and len(pending) > 1:
        return []
    strange = [rank for rank in pending if by_rank[rank] and not usual.knows(by_rank[rank])]
    if not usual.sequences:
        strange = []
    if strange and len(strange) < max(len(pending), 2):
        return strange
    if not _differ([by_rank[rank] for rank in pending]):
        return []
    keys = Counter(call.key for call in pending.values())
    (most, many), *rest = keys.most_common()
    if not rest or rest[0][1] == many:
        return sorted(pending)
    return sorted(rank for rank, call in pending.items() if call.key != most)


def _differ(sequences: Sequence[Sequence[Call]]) -> bool:
    """Whether two of them have another call at the same place."""
    return any(len({call.key for call in calls}) > 1 for calls in zip(*sequences, strict=False))
