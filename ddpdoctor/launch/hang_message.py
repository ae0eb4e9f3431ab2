"""Sentences on a hang, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.launch.hang_detection import HangCandidate
from ddpdoctor.launch.rankwatch import Activity, WatchedRank
from ddpdoctor.rundir.ends import innermost_line
from ddpdoctor.rundir.stops import phase_words

_MOST_NAMED = 3
"""Ranks listed one by one; the report has all."""


def hang_sentences(candidate: HangCandidate, here: str) -> list[str]:
    """Two sentences: that the job seems to hang, and where each rank is. ``here``: " of this host" if the job has ranks elsewhere, too."""
    longest_s = candidate.longest_gap_s
    before = f" (its longest pause before was {_seconds(longest_s)})" if longest_s else ""
    none_joined = not any(rank.joined for rank in (*candidate.blocking, *candidate.waiting))
    what = "joined its process group" if none_joined else "finished a step"
    since = f"no rank{here} has {what} for {_seconds(candidate.silent_s)}{before}"
    computing = [rank for rank in candidate.blocking if rank.computes]
    or_not = f", or rank {computing[0].rank} computes for long" if computing else ""
    return [f"{since}: the job seems to hang{or_not}.", _who(candidate)]


def unknown_sentence(candidate: HangCandidate, here: str) -> str:
    """That no step was finished for long, and why it is unknown whether the job hangs."""
    return (
        f"no rank{here} has finished a step for {_seconds(candidate.silent_s)}; whether the job hangs is not known: "
        f"{_named(candidate.unknown)}."
    )


def elsewhere_sentence(silent_s: float, computing: Sequence[WatchedRank]) -> str:
    """That no rank of this host waits, and which of them compute: ranks of other hosts may wait for them."""
    return f"no rank of this host has finished a step for {_seconds(silent_s)}; ranks of other hosts may wait for it: {_named(computing)}."


def uncounted_sentence(silent_s: float, ranks: Sequence[WatchedRank]) -> str:
    """That no step was finished for long, and that nothing shows whether ranks wait for each other on their devices."""
    why = "torch counts no collectives of these ranks, so a wait on a device looks like a computation"
    return f"no rank has finished a step for {_seconds(silent_s)}; whether the job hangs is not known ({why}): {_named(ranks)}."


def _who(candidate: HangCandidate) -> str:
    if not candidate.blocking:
        return f"all ranks wait for others: {_named(candidate.waiting)}."
    waiting = ", ".join(str(rank.rank) for rank in candidate.waiting[:8])
    more = " ..." if len(candidate.waiting) > 8 else ""
    many = len(candidate.waiting) > 1
    rest = f"; rank{'s' if many else ''} {waiting}{more} wait{'' if many else 's'}" if waiting else ""
    return f"{_named(candidate.blocking)}{rest}."


def _named(ranks: Sequence[WatchedRank]) -> str:
    listed = "; ".join(map(_of, ranks[:_MOST_NAMED]))
    return listed + (f"; and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else "")


def _of(rank: WatchedRank) -> str:
    whom = f"rank {rank.rank} (process {rank.here_pid or rank.pid})"
    if rank.end is not None:
        how = f"was ended by signal {rank.end['signal']}" if rank.end["signal"] is not None else "has ended"
        if rank.end["code"]:
            how = f"ended with exit code {rank.end['code']}"
        return f"{whom} {how} {f'in step {rank.steps}' if rank.joined else 'before it joined'}"
    if not rank.joined:
        place = rank.where()
        at = f", at {place}" if place else ""
        return f"{whom} {'waits in' if rank.waits else 'has not called'} init_process_group{at}"
    if rank.suspended:
        return f"{whom} was suspended (SIGSTOP) in step {rank.steps}"
    if not rank.reports:
        if not rank.holds_gil:
            return f"{whom} does not answer{f' in step {rank.steps}' if rank.counts else ''}"
        place = innermost_line(rank.faults, or_library=True)
        where = f", at {place}" if place else ""
        return f"{whom} does not answer in step {rank.steps}{where}: something holds Python's lock (the GIL)"
    does = "computing" if rank.activity is Activity.COMPUTES else _does(phase_words(rank.phase) or "")
    place = rank.where()
    return f"{whom} is {f'at {place} ' if place else ''}in step {rank.steps}{f', {does}' if does else ''}"


def _does(words: str) -> str:
    return words if not words or words.partition(" ")[0].endswith("ing") else f"in {words}"


def _seconds(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} minutes"
