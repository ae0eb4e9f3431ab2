"""Ranks that called what does not go together, in a job that did not survive it: Gloo ends the rank that is sent more than it asked
for, or has it raise, and every other rank loses its connection."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from ddpdoctor.measure.hangfacts import StopFacts
from ddpdoctor.measure.places import Where

from .calls import Call, disagreeing, gradients, in_backward
from .evidence import RankEvidence, RunEvidence
from .frames import distinct_places
from .mismatches import Difference

_GLOO = "gloo"
_SIZES = re.compile(
    r"op\.preamble|enforce fail at .*gloo|EnforceNotMet|(?:size|shape|type)s? (?:mismatch|do(?:es)? not match)"
)
"""What Gloo says where it raises instead."""


def disagreement(run: RunEvidence) -> StopFacts | None:
    """Who called something else than the others, where a rank ended by that; None where none did, or all called the same."""
    victims = [each for each in run.ranks.values() if _ended_by_sizes(each)]
    step = max((each.step for each in victims if each.step is not None), default=None)
    if step is None or _GLOO not in (run.backend or ""):
        return None
    there = {rank: each for rank, each in run.ranks.items() if each.step == step}
    pending = {rank: call for rank, each in there.items() if (call := _pending(each, run)) is not None}
    by_rank = {rank: each.calls for rank, each in there.items()}
    odd = disagreeing(by_rank, pending, run.usual)
    if not odd:
        return None
    others = [rank for rank in sorted(run.ranks) if rank not in odd]
    one = pending[odd[0]]
    other = next(
        (pending[rank] for rank in (*others, *odd[1:]) if rank in pending and pending[rank].key != one.key),
        None,
    )
    return StopFacts(
        ranks=sorted(odd),
        waiting_ranks=others,
        collective=None if other is None else other.words,
        unlike=one.words,
        kind=_kind(one, other, run).value,
        step=step,
        where=distinct_places([_place(run.ranks[rank], pending) for rank in odd]),
        waits_at=distinct_places([_place(run.ranks[rank], pending) for rank in others if rank in pending]),
        evidence=[_called(rank, pending[rank]) for rank in sorted(pending)]
        + [_met(each) for each in victims],
    )


def _ended_by_sizes(each: RankEvidence) -> bool:
    """Whether Gloo ended it, or had it raise, because of what it was sent."""
    if any(_SIZES.search(str(raised.get("message") or "")) for raised in each.raised):
        return True
    # By a thread that is none of Python's: what stands there is the training thread.
    return each.signal == signal.SIGABRT and (each.calls_open or in_backward(each.phase, each.stack))


def _pending(each: RankEvidence, run: RunEvidence) -> Call | None:
    """What it had called and not come back from; None where that is not known."""
    backward = in_backward(each.phase, each.stack)
    if each.calls and not each.calls[-1].returned and not backward:
        return each.calls[-1]
    if backward:
        return gradients(each.where or run.usual.backward_at)
    return None


def _place(each: RankEvidence, pending: Mapping[int, Call]) -> Where | None:
    """Where its stack shows it; else where the call came from."""
    called = pending[each.rank].where if each.rank in pending else None
    return (each.where if each.stack else None) or called or each.where


def _kind(one: Call, other: Call | None, run: RunEvidence) -> Difference:
    if other is None:
        return Difference.EXTRA
    if one.operation == other.operation:
        return Difference.ORDER if run.usual.has_both(one, other) else Difference.SHAPE
    return Difference.OPERATION


def _called(rank: int, call: Call) -> str:
    at = f" at {call.where.file}:{call.where.line}" if call.where else ""
    return f"Rank {rank} had called {call.words}{at}, and the call had not returned."


def _met(each: RankEvidence) -> str:
    how = f"ended rank {each.rank}" if each.signal is not None else f"had rank {each.rank} raise"
    return f"Gloo {how}: what it received does not match what it had called."
