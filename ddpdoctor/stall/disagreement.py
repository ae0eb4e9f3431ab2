"""Finds ranks that called different collectives, in a job that hung or failed because of it. If a rank receives more data than it
expected, Gloo aborts it or makes it raise, and every other rank loses its connection; otherwise all ranks wait."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection

from msgspec.structs import replace

from ddpdoctor.measure.runfacts import StopFacts
from ddpdoctor.rundir.ends import POLITE
from ddpdoctor.rundir.stepevents import WAITING_PHASES

from .calls import GRADIENTS, Call, CallDifference, first_call_difference, in_backward
from .causes import lost_others
from .evidence import RankEvidence, RunEvidence, first_step
from .groups import Difference, Mismatch
from .recording import distinct_places

_GLOO = "gloo"
_RECEIVED = re.compile(r"op\.preamble|Received data size|distributed collective mismatch")
"""Gloo's messages if it raises instead of aborting."""
_SIZES = re.compile(
    r"enforce fail at .*gloo|EnforceNotMet|(?:size|shape|type)s? (?:mismatch|do(?:es)? not match)"
)
"""Messages that come from Gloo only if the rank is in a collective; otherwise a layer may have raised them because of its input."""
_MOST_LISTED = 12
"""Most ranks listed with their calls."""


def disagreement(run: RunEvidence) -> StopFacts | None:
    """The ranks that called something else than the others; None if all called the same, or if another cause ended the job first."""
    if _has_own_cause(run):
        return None
    found = first_call_difference({rank: each.calls for rank, each in run.ranks.items()})
    return _from_gloo_only(run) if found is None else _facts_of_difference(found, run)


def _from_gloo_only(run: RunEvidence) -> StopFacts | None:
    """The cause if Gloo reports different sizes but the recorded calls agree: the data of a call differ, as with different models."""
    reporting = [each for each in run.ranks.values() if _has_message(_RECEIVED, each)]
    if not reporting:
        return None
    return StopFacts(
        waiting_ranks=sorted(run.ranks),
        kind=Difference.SHAPE.value,
        step=first_step(reporting),
        waits_at=distinct_places([each.calls[-1].where for each in run.ranks.values() if each.calls]),
        evidence=[*_positions(run), *map(_gloo_sentence, reporting)],
    )


def disagreement_in_hang(mismatch: Mismatch | None, run: RunEvidence, whole: bool) -> StopFacts | None:
    """The difference in the ranks' own call logs, with the calling lines; None if flight recorders (of all ranks if ``whole``) show another
    one or none."""
    if mismatch is None and whole:
        return None
    called = disagreement(run)
    if called is None or ran_out(called.ranks or (), run.ranks, run):
        return None
    agrees = mismatch is None or not mismatch.others or list(mismatch.odd) == called.ranks
    return called if agrees and (mismatch is None or called.waiting_ranks) else None


def ran_out(odd: Collection[int], ranks: Collection[int], run: RunEvidence) -> bool:
    """Whether some of the ranks ``odd`` have exhausted their data and others of ``ranks`` have not."""
    others = [rank for rank in ranks if rank not in odd]
    out = [rank for rank in odd if run.ranks[rank].exhausted]
    return bool(out) and not (others and all(run.ranks[rank].exhausted for rank in others))


def with_positions(cause: StopFacts, run: RunEvidence) -> StopFacts:
    """``cause``, with each rank's last call as evidence if its ranks ended inside a collective, where another rank may be the cause."""
    named = [run.ranks[rank] for rank in cause.ranks or () if rank in run.ranks]
    if not any(_is_in_collective(each) and each.signal != signal.SIGKILL for each in named):
        return cause
    return replace(cause, evidence=[*cause.evidence, *_positions(run)])


def _positions(run: RunEvidence) -> list[str]:
    """One sentence per rank on its last call."""
    found = ((rank, each) for rank, each in sorted(run.ranks.items()) if each.calls)
    return [_call_sentence(rank, each.calls[-1], each.open_call is not None) for rank, each in found][
        :_MOST_LISTED
    ]


def _is_in_collective(each: RankEvidence) -> bool:
    """Whether it had called a collective that had not returned, or was not complete on its device."""
    return each.open_call is not None or in_backward(each.phase, each.stack) or bool(each.waits)


def _has_own_cause(run: RunEvidence) -> bool:
    """Whether a rank ended for a reason of its own before any rank was ended because of others."""
    ended = [each for each in run.ranks.values() if _ended_by_others(each)]
    known_ns = [at for each in ended if (at := each.raised_ns or each.gone_ns) is not None]
    failed = [
        each
        for each in run.ranks.values()
        if each.raised or (each.signal is not None and each.signal not in POLITE)
    ]
    own = (each for each in failed if not _ended_by_others(each))
    return any(not known_ns or (each.raised_ns or each.gone_ns or 0) < min(known_ns) for each in own)


def _ended_by_others(each: RankEvidence) -> bool:
    """Whether Gloo aborted it or made it raise because of received data, or it lost the connection to the others."""
    return _ended_by_mismatch(each) or (bool(each.raised) and lost_others(each))


def _has_message(pattern: re.Pattern[str], each: RankEvidence) -> bool:
    return any(pattern.search(str(raised.get("message") or "")) for raised in each.raised)


def _ended_by_mismatch(each: RankEvidence) -> bool:
    if _has_message(_RECEIVED, each) or (each.phase in WAITING_PHASES and _has_message(_SIZES, each)):
        return True
    # Aborted by a thread of Gloo: the recorded stack is the training thread's.
    return each.signal == signal.SIGABRT and not each.raised and _is_in_collective(each)


def _facts_of_difference(found: CallDifference, run: RunEvidence) -> StopFacts:
    calls, odd = found.by_rank, list(found.odd)
    others = [rank for rank in sorted(run.ranks) if rank not in odd] if found.is_decided else []
    one = calls[odd[0]]
    other = next(
        calls[rank] for rank in (*others, *odd) if rank in calls and calls[rank].placed_key != one.placed_key
    )
    kind = _kind(one, other, found.turn)
    if kind in (Difference.EXTRA, Difference.LACKING) and not found.is_decided:
        kind = Difference.OPERATION  # unknown which rank deviates
    return StopFacts(
        ranks=odd,
        waiting_ranks=others,
        group=one.group,
        collective=other.words,
        sequence=found.turn,
        unlike=one.words,
        kind=kind.value,
        step=first_step(calls.values()),
        since_s=run.since_s,
        where=distinct_places([calls[rank].where for rank in odd]),
        waits_at=distinct_places([calls[rank].where for rank in others if rank in calls] or [other.where]),
        evidence=[_call_sentence(rank, call, not call.returned) for rank, call in sorted(calls.items())][
            :_MOST_LISTED
        ]
        + [
            _gloo_sentence(each)
            for each in run.ranks.values()
            if _GLOO in (run.backend or _GLOO) and _ended_by_mismatch(each)
        ],
    )


def _kind(one: Call, other: Call, turn: int) -> Difference:
    """Difference between ``one``, the deviating call, and ``other``, the call with the same number."""
    if one.before[:1] == (turn - 1,) and one.before[1:] != (turn - 2,):
        return Difference.EXTRA  # called twice in a row, unlike before
    if one.operation == other.operation:
        if one.before and other.before:
            return Difference.ORDER
        return Difference.DTYPE if one.dtype != other.dtype else Difference.SHAPE
    if not (one.is_by_ddp or other.is_by_ddp):
        return Difference.OPERATION
    # DDP issues the same collectives in every step: a rank that is there already has skipped the call that was due.
    skipped = one.is_by_ddp and one.before and other.operation != GRADIENTS
    return Difference.LACKING if skipped else Difference.EXTRA


def _call_sentence(rank: int, call: Call, is_open: bool) -> str:
    at = f" at {call.where.file}:{call.where.line}" if call.where else ""
    number = f" as call {call.turn} of group {call.group}" if call.turn else ""
    step = "" if call.step is None else f" in step {call.step}"
    end = "and the call had not returned" if is_open else "which had returned"
    return f"Rank {rank} had called {call.words}{at}{number}{step}, {end}."


def _gloo_sentence(each: RankEvidence) -> str:
    how = f"ended rank {each.rank}" if each.signal is not None else f"had rank {each.rank} raise"
    return f"Gloo {how}: what it received does not match what it had called."
