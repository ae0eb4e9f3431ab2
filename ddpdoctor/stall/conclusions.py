"""Collects the evidence for :mod:`ddpdoctor.rundir.ends`, which decides why each rank ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from ddpdoctor.rundir import listed
from ddpdoctor.rundir.ends import POLITE, Conclusion, Exit, RankEnd, conclude, exit_of
from ddpdoctor.rundir.stops import signal_name

from .causes import exit_text, lost_others, was_asked_before
from .evidence import RankEvidence, RunEvidence

_POLL_SPREAD_NS = 5_000_000
"""Ends found in one poll of the hang monitor are recorded within a millisecond, in arbitrary order."""
_AT_ONE_MOMENT_NS = 100_000_000
"""Longest time between the recorded ends of ranks that a controller ended together."""
_MOST_EARLIER = 4
"""Most ends of earlier attempts listed in one sentence."""


def conclusions(run: RunEvidence) -> dict[int, Conclusion]:
    """The conclusion for each rank whose process is gone."""
    gone = [each for each in run.ranks.values() if each.is_gone]
    found = {each.rank: conclude(_end_evidence(each, run), run.job) for each in gone}
    if not any(
        found[each.rank] is Conclusion.FAILED for each in gone if not (each.raised and lost_others(each))
    ):
        # A launcher ends the other ranks once one has failed. If none has, the first rank to end was ended from outside.
        found = {each.rank: conclude(_end_evidence(each, run, alone=True), run.job) for each in gone}
    return found


def doubtful_ends(run: RunEvidence) -> list[str]:
    """Sentences on ranks' ends that are inconsistent with a job without a known failure, and on earlier attempts that failed."""
    if run.job.failed:
        return []
    concluded = conclusions(run)
    by_way: dict[str, list[int]] = {}
    for rank, each in sorted(run.ranks.items()):
        said = Conclusion.UNKNOWN, Conclusion.REQUESTED
        if concluded.get(rank) in said and not each.in_order and (each.code or each.signal):
            by_way.setdefault(_exit_text(each.code, each.signal), []).append(rank)
    but = (
        "although the job's exit code is 0: a controller may have done that, or a script hides a failure; no other rank shows one"
        if run.job.succeeded
        else "and the job's own end is not known"
    )
    found = [
        f"{_ranks_text(ranks).capitalize()} {'was' if len(ranks) == 1 else 'were'} ended by {way} without closing the process group, {but}."
        for way, ranks in by_way.items()
    ]
    before = sorted(
        {(int(row["rank"]), _exit_text(row.get("code"), row.get("signal"))) for row in run.earlier}
    )
    if before and run.job.succeeded:
        ends = listed([f"rank {rank} by {way}" for rank, way in before], _MOST_EARLIER)
        found.append(f"An earlier attempt ended ({ends}); a later one ended in order, with exit code 0.")
    return found


def ended_by_controller(run: RunEvidence) -> bool:
    """Whether a controller ended all ranks: together, with one exit code, and none by the end of its own program."""
    gone_ns = [each.gone_ns for each in run.ranks.values() if each.gone_ns is not None]
    codes = {each.code for each in run.ranks.values()}
    alone = len(gone_ns) < max(2, len(run.ranks)) or any(each.left for each in run.ranks.values())
    return not alone and len(codes) == 1 and any(codes) and max(gone_ns) - min(gone_ns) < _AT_ONE_MOMENT_NS


def controller_sentences(run: RunEvidence) -> list[str]:
    """Sentences that show that a controller ended all ranks of a failed job; [] if it did not."""
    if not ended_by_controller(run):
        return []
    closed = [rank for rank, each in sorted(run.ranks.items()) if each.in_order]
    code = next(each.code for each in run.ranks.values())
    said = f"All ranks ended with exit code {code} at one moment, as a controller ends its workers, so no rank's end shows the cause."
    some = 0 < len(closed) < len(run.ranks)
    return [said, f"Before that, only {_ranks_text(closed)} had ended the process group."] if some else [said]


def ended_well(run: RunEvidence) -> bool:
    """Whether the job ended with exit code 0, every rank in order and none from outside."""
    asked = run.end_request is not None or run.ended_by_option
    well = (
        each.in_order and not each.raised and not each.signal and not each.code for each in run.ranks.values()
    )
    return run.job.succeeded and not asked and all(well)


def end_of_hang(run: RunEvidence) -> str | None:
    """What ended a job that hung, as a clause after "until"; None if it still hangs or this is unknown."""
    if run.still_hangs:
        return None
    if run.ended_by_option:
        return "--on-hang kill ended it"
    if run.end_request is not None and run.end_request.signal is not None:
        return f"{signal_name(run.end_request.signal)} ended it"
    if run.killed:
        return "it was killed"
    if (number := _signal_to_ranks(run)) is not None:
        return f"{signal_name(number)} ended it"
    return f"it ended with {_exit_text(run.job.code, run.job.signal)}" if run.job.over else None


def _signal_to_ranks(run: RunEvidence) -> int | None:
    """The signal that ended the ranks, but not their launcher, in a job that hung. If there are several, the first one other than SIGTERM,
    which launchers send to the other ranks. None if a rank ended otherwise."""
    gone = sorted(
        (each for each in run.ranks.values() if each.is_gone and run.existed_in_hang(each)),
        key=lambda each: each.gone_ns or 0,
    )
    sent = [each.signal for each in gone]
    return None if None in sent else next((n for n in sent if n != signal.SIGTERM), next(iter(sent), None))


def _ranks_text(ranks: Sequence[int]) -> str:
    """Rank numbers as text."""
    many = f"ranks {', '.join(map(str, ranks[:8]))}{' and more' if len(ranks) > 8 else ''}"
    return f"rank {ranks[0]}" if len(ranks) == 1 else many


def _end_evidence(each: RankEvidence, run: RunEvidence, *, alone: bool = False) -> RankEnd:
    """The evidence on a rank's end. ``alone``: no rank is known to have failed before."""
    asked = run.end_request.signal if run.end_request is not None else None
    # SIGKILL is not a request to end: the kernel may send it when memory is exhausted.
    polite = POLITE | ({asked} if asked and asked != signal.SIGKILL else set())
    way = exit_of(each.code, each.signal, left=each.left, polite=polite)
    if way is Exit.CODE and ended_by_controller(run):
        way = Exit.SAME_CODE
    lost = (alone or way is not Exit.POLITE) and any(
        _was_affected(other, each, run) for other in run.ranks.values()
    )
    return RankEnd(
        exit=way,
        closed=each.in_order,
        raised=bool(each.raised),
        requested=was_asked_before(run, each.gone_ns),
        lost=lost,
        confirmed=lost
        or run.job.failed
        or "Fatal Python error" in each.faults
        or (each.signal == signal.SIGKILL and (each.oom_kills > 0 or run.oom_kills > 0)),
    )


def _was_affected(other: RankEvidence, each: RankEvidence, run: RunEvidence) -> bool:
    """Whether ``other`` was affected by the end of ``each``: it waits, raised because of a lost connection, or was ended later."""
    if other.rank == each.rank or each.gone_ns is None:
        return False
    if other.gone_ns is None:
        return lost_others(other) if other.raised else run.hangs and not other.in_order
    if each.signal in POLITE and other.gone_ns < each.gone_ns + _POLL_SPREAD_NS:
        return False  # the launcher may have ended it because the other had failed
    if other.raised:
        return lost_others(other)
    return not other.in_order and other.gone_ns > each.gone_ns and other.signal in POLITE - {each.signal}


def _exit_text(code: int | None, number: int | None) -> str:
    return exit_text(code, number) or "an unknown way"
