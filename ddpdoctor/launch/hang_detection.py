"""Whether a job stands still: from what its ranks show at each look, and what was usual for it so far.

A step of any rank is progress. So is, within a long step, what ranks have begun and finished in it, a rank that does not wait for
others and works (it, or what it has started, moves data or takes memory; it evaluates, saves or compiles), and a rank that a person
holds. Of a rank that shows nothing it is not known whether it makes progress, and then a hang is not reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpdoctor.launch.rankwatch import Activity, WatchedRank
from ddpdoctor.rundir import LONG_PHASES


@dataclass(frozen=True)
class Tuning:
    """What decides."""

    after_s: float = 300.0
    """Half of the shortest time after which a collective's own timeout ends a job (NCCL's ten minutes, Gloo's thirty)."""
    times_longest: float = 10.0
    """Of the job's own longest pause: an evaluation on more data than the last one takes a few times as long."""
    times_before_first: float = 3.0
    """Before the first step a job builds its data set, its model and what it compiles, and nothing of it is known: so much longer,
    as long as a rank that others wait for computes, reads or writes."""
    least_before_first_s: float = 60.0
    """The same, for whoever asks for a short time: to import a framework from shared storage takes a minute."""
    after_death_s: float = 30.0
    """Where a rank has died and others wait for it; torchrun ends those within a second."""
    times_in_long_phase: float = 5.0
    """Where the rank that others wait for evaluates, saves, loads or compiles: that takes long in healthy jobs, and may show nothing
    meanwhile, as while slow storage takes a checkpoint. Of the default time, 25 minutes."""
    most_suspended_s: float = 90.0
    """A rank that somebody has suspended is not said to hang before: to look at it takes a minute, and is healthy."""
    times_after_last: float = 4.0
    """Where every rank is through with its data and one works: it may export what was trained."""
    most_pause_s: float = 2.0
    """Between two looks; beyond it this process itself was suspended, and with it, maybe, the job."""


@dataclass(frozen=True)
class HangCandidate:
    """A job that stands still."""

    silent_s: float
    after_s: float
    longest_gap_s: float
    blocking: tuple[WatchedRank, ...]
    """Those that do not wait for others; empty where all do, or none does."""
    waiting: tuple[WatchedRank, ...]
    unknown: tuple[WatchedRank, ...] = ()
    """Those that show nothing: with any of them, whether the job hangs is not known."""


class ProgressTracker:
    """Of one host's ranks."""

    def __init__(self, after_s: float | None, tuning: Tuning) -> None:
        """``after_s`` is what the user asked for; None: by the job's own history."""
        self._asked_s, self._tuning = after_s, tuning
        self._looked_s: float | None = None
        self._signs: dict[int, tuple[Any, ...]] = {}
        self.silent_s = self.longest_gap_s = 0.0
        self._since_step_s = self._suspended_s = 0.0
        self._steps_seen = 0
        self._attempt: frozenset[int] = frozenset()
        """Process ids of the attempt whose steps are counted: an elastic restart begins another one."""
        self.progressed = False
        """Whether the last look showed something new."""
        self.paused_in: str | None = None
        """In what phase, other than a step's usual ones, a rank works."""

    def look(self, now_s: float, stepped: bool, ranks: Sequence[WatchedRank]) -> None:
        """Take in what a look at ``now_s``, monotonic, showed."""
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, self._tuning.most_pause_s)
        self._looked_s = now_s
        self._note_attempt(ranks)
        self.silent_s += passed_s
        self._since_step_s += passed_s
        does = {} if stepped else {rank.pid: rank.activity for rank in ranks if rank.alive}
        self.paused_in = next(
            (rank.phase or "other" for rank in ranks if does.get(rank.pid) is Activity.WORKS), None
        )
        signs = {rank.pid: rank.signs for rank in ranks}
        moved, self._signs = _has_new_sign(self._signs, signs), signs
        if stepped:
            if self._steps_seen:
                # What comes before the first step is of another kind.
                self.longest_gap_s = max(self.longest_gap_s, self._since_step_s)
            self._steps_seen += 1
            self._since_step_s = 0.0
        held = [rank for rank in ranks if does.get(rank.pid) is Activity.HELD]
        suspended = bool(held) and all(rank.suspended for rank in held)
        self._suspended_s = self._suspended_s + passed_s if suspended else 0.0
        is_held = bool(held) and (not suspended or self._suspended_s < self._tuning.most_suspended_s)
        if is_held:
            self._since_step_s = 0.0
        self.progressed = stepped or moved or self.paused_in is not None
        early = any(not rank.joined for rank in ranks) and not any(rank.waits for rank in ranks)
        uncounted = any(rank.joined and rank.alive and not rank.counts for rank in ranks)
        if self.progressed or is_held or early or uncounted or not ranks:
            self.silent_s = 0.0

    def _note_attempt(self, ranks: Sequence[WatchedRank]) -> None:
        """A restart starts all ranks again, and what comes before their first step takes as long as it did the first time."""
        now = frozenset(rank.pid for rank in ranks if rank.alive)
        if now and self._attempt and not now & self._attempt:
            self._steps_seen, self._since_step_s, self.silent_s = 0, 0.0, 0.0
        self._attempt = now or self._attempt

    def is_long(self, ranks: Sequence[WatchedRank]) -> bool:
        """Whether nothing has shown for as long as would do, whoever waits for whom: others may do so elsewhere."""
        left, waiting, dead = _by_state(ranks)
        return bool(left) and self.silent_s >= self._after_s(left, waiting, dead)

    def hang_candidate(self, ranks: Sequence[WatchedRank]) -> HangCandidate | None:
        """What is to be thought of it now; None where nothing is."""
        left, waiting, dead = _by_state(ranks)
        blocking = tuple(rank for rank in left if not rank.waits)
        after_s = self._after_s(left, waiting, dead)
        if not left or self.silent_s < after_s:
            return None
        alone = len(left) + len(dead) < len(ranks)
        if not waiting and (any(rank.busy for rank in left) or alone or _is_through(left)):
            # Nobody is kept waiting, and somebody works, or is alone with the end of the job, which others have ended in order.
            return None
        unknown = tuple(rank for rank in blocking if rank.activity is Activity.UNKNOWN)
        return HangCandidate(self.silent_s, after_s, self.longest_gap_s, (*dead, *blocking), waiting, unknown)

    def _after_s(
        self, left: Sequence[WatchedRank], waiting: Sequence[WatchedRank], dead: Sequence[WatchedRank]
    ) -> float:
        tuning = self._tuning
        asked_s = self._asked_s
        after_s = (
            max(tuning.after_s, tuning.times_longest * self.longest_gap_s) if asked_s is None else asked_s
        )
        if not self._steps_seen:
            if asked_s is not None and waiting and not any(rank.alone for rank in left):
                return asked_s
            return max(after_s * tuning.times_before_first, tuning.least_before_first_s)
        if dead and waiting and any(rank.end and rank.end["signal"] is not None for rank in dead):
            return min(after_s, tuning.after_death_s)
        if any(rank.busy and not rank.waits for rank in left) and _is_through(left):
            return after_s * tuning.times_after_last
        if any(rank.phase in LONG_PHASES and not rank.waits for rank in left):
            return after_s * tuning.times_in_long_phase
        return after_s


def _by_state(
    ranks: Sequence[WatchedRank],
) -> tuple[list[WatchedRank], tuple[WatchedRank, ...], tuple[WatchedRank, ...]]:
    """Those that are left, of them those that wait, and those that died."""
    left = [rank for rank in ranks if rank.alive and not rank.ended]
    waiting = tuple(rank for rank in left if rank.waits)
    dead = tuple(rank for rank in ranks if rank.end is not None and not rank.end["in_order"])
    return left, waiting, dead


def _has_new_sign(before: dict[int, tuple[Any, ...]], now: dict[int, tuple[Any, ...]]) -> bool:
    """Whether a rank has said something new of itself; to say nothing any more is not new."""
    return any(signs and before.get(pid) not in (None, (), signs) for pid, signs in now.items())


def _is_through(ranks: Sequence[WatchedRank]) -> bool:
    """Whether all have come to the end of their data in the step in progress."""
    return all(rank.progress.get("exhausted") is True for rank in ranks)
