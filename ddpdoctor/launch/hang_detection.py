"""Decides, from one poll per second and the job's own history, whether the ranks of this host have made no progress for too long.

Progress is any of: a rank finishes a step; an event begins or ends within a long step; a rank does not wait for others and works (it or its
children move data or take memory; or it evaluates, saves, loads or compiles, and uses a processor). The silence timer is also reset while a
person holds a rank (debugger, SIGSTOP, prompt). If the state of a rank is unknown, no hang is reported.

``--on-hang kill`` ends the job only if the hang is proven. That a rank does not answer proves nothing. Two independent sources must agree
for each rank: the kernel (its process has ended, or it and its children use no resources) and the rank itself (it answered a request during
the hang, and waits for other ranks or is still at the same line). If a thread holds the GIL, the rank cannot answer; faulthandler, which
does not need the GIL, then shows its stack instead.

The messages about a hang are at the end of this file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ddpdoctor.hook.environment import DEFAULT_HANG_AFTER_S
from ddpdoctor.launch.rankwatch import Activity, WatchedRank
from ddpdoctor.rundir.packages import innermost_line
from ddpdoctor.rundir.stepevents import LONG_PHASES, Phase, phase_words


@dataclass(frozen=True)
class Tuning:
    """Limits and factors of the decision."""

    after_s: float = DEFAULT_HANG_AFTER_S
    """Limit of the silence, if the history does not require a longer one: half of the shortest default timeout of collectives (NCCL: ten
    minutes, Gloo: thirty)."""
    longest_gap_factor: float = 10.0
    """The limit is at least this multiple of the longest time between two steps so far: an evaluation on more data takes a few times as
    long."""
    before_first_factor: float = 3.0
    """Factor on the limit before the first step, while the dataset and the model are built and compiled: the job has no history yet. It
    also applies to a limit set by the user, unless a rank waits for others and no rank works without the others."""
    min_before_first_s: float = 60.0
    """Minimum limit before the first step: importing a framework from shared storage takes a minute."""
    after_death_s: float = 30.0
    """Limit if a rank has ended with a signal or an exit code other than 0, and others wait for it. (torchrun would end the others within a
    second.)"""
    long_phase_factor: float = 5.0
    """Factor on the limit (which gives 25 minutes by default) while a rank that does not wait evaluates, saves, loads or compiles. In
    healthy jobs, these phases may take long without any visible activity, for example while slow storage writes a checkpoint."""
    max_suspended_s: float = 90.0
    """A suspension (SIGSTOP) counts as silence only after this time: a person may inspect a rank for a minute."""
    after_last_factor: float = 4.0
    """Factor on the limit if every rank has exhausted its data and one uses a processor: it may be exporting the model."""
    max_pause_s: float = 2.0
    """At most this much time counts from one poll to the next: if the polls are further apart, this process was suspended, possibly
    together with the job."""


@dataclass(frozen=True)
class HangCandidate:
    """Ranks of this host have made no progress for longer than the limit. Times in seconds."""

    silent_s: float
    """Time since the last step, before the first step without progress."""
    after_s: float
    longest_gap_s: float
    blocking: tuple[WatchedRank, ...]
    """Ranks that died, and running ranks that do not wait for others. Empty if all ranks wait."""
    waiting: tuple[WatchedRank, ...]
    unknown: tuple[WatchedRank, ...] = ()
    """Ranks whose state is unknown. If there are any, it is unknown whether the job hangs."""


class ProgressTracker:
    """Progress of one host's ranks; call ``update`` at each poll."""

    def __init__(self, after_s: float | None, tuning: Tuning) -> None:
        """``after_s``: the user's limit (``--hang-after``); None derives it from the job's own history."""
        self._user_limit_s, self._tuning = after_s, tuning
        self._polled_s: float | None = None
        self._signs: dict[tuple[int, int], tuple[Any, ...]] = {}
        """Signs of progress by rank and process id."""
        self.silent_s = self.longest_gap_s = 0.0
        self._since_step_s = self._suspended_s = 0.0
        self._steps_seen = 0
        self._attempt: frozenset[int] = frozenset()
        """Process ids of the current attempt. An elastic restart begins a new attempt."""
        self.progressed = self.reported_progress = False
        """Whether the last poll showed any progress, and whether it showed progress within a step that a rank itself reported."""
        self.paused_in: str | None = None
        """At the last poll: the phase of a rank that worked ("other" if its phase was unknown); None if no rank worked."""

    def update(self, now_s: float, stepped: bool, ranks: Sequence[WatchedRank]) -> None:
        """Update the silence timers from one poll. ``now_s``: monotonic seconds; ``stepped``: whether any rank finished a step."""
        passed_s = 0.0 if self._polled_s is None else min(now_s - self._polled_s, self._tuning.max_pause_s)
        self._polled_s = now_s
        self._note_attempt(ranks)
        self.silent_s += passed_s
        self._since_step_s += passed_s
        activities = {} if stepped else {rank.key: rank.activity for rank in ranks if rank.alive}
        self.paused_in = next(
            (rank.phase or "other" for rank in ranks if activities.get(rank.key) is Activity.WORKS), None
        )
        signs = {rank.key: rank.signs for rank in ranks}
        self.reported_progress, self._signs = _has_new_sign(self._signs, signs), signs
        if stepped:
            if self._steps_seen:
                # The time before the first step is not a gap: it is not comparable with the time between steps.
                self.longest_gap_s = max(self.longest_gap_s, self._since_step_s)
            self._steps_seen += 1
            self._since_step_s = 0.0
        held = [rank for rank in ranks if activities.get(rank.key) is Activity.HELD]
        suspended = bool(held) and all(rank.suspended for rank in held)
        self._suspended_s = self._suspended_s + passed_s if suspended else 0.0
        is_held = bool(held) and (not suspended or self._suspended_s < self._tuning.max_suspended_s)
        if is_held:
            self._since_step_s = 0.0
        self.progressed = stepped or self.reported_progress or self.paused_in is not None
        is_joining = any(not rank.joined for rank in ranks) and not any(rank.waits for rank in ranks)
        has_uncounted = any(rank.joined and rank.alive and not rank.counts for rank in ranks)
        if self.progressed or is_held or is_joining or has_uncounted or not ranks:
            self.silent_s = 0.0

    def _note_attempt(self, ranks: Sequence[WatchedRank]) -> None:
        """Reset the timers after an elastic restart, because the new attempt may again need a long time before its first step."""
        now = frozenset(rank.pid for rank in ranks if rank.alive)
        if now and self._attempt and not now & self._attempt:
            self._steps_seen, self._since_step_s, self.silent_s = 0, 0.0, 0.0
        self._attempt = now or self._attempt

    def is_long(self, ranks: Sequence[WatchedRank]) -> bool:
        """Whether the silence has reached the limit, even if no rank of this host waits: ranks of other hosts may wait."""
        left, waiting, dead = _by_state(ranks)
        return bool(left) and self.silent_s >= self._after_s(left, waiting, dead)

    def hang_candidate(self, ranks: Sequence[WatchedRank]) -> HangCandidate | None:
        """The possible hang at the last poll; None if there is none."""
        left, waiting, dead = _by_state(ranks)
        blocking = tuple(rank for rank in left if not rank.waits)
        after_s = self._after_s(left, waiting, dead)
        if not left or self.silent_s < after_s:
            return None
        alone = len(left) + len(dead) < len(ranks)
        if not waiting and (any(rank.busy for rank in left) or alone or _have_exhausted_data(left)):
            # If no rank waits, it is not a hang if one uses a processor, or some have ended in order, or all have exhausted their data.
            return None
        unknown = tuple(rank for rank in blocking if rank.activity is Activity.UNKNOWN)
        silent_s = since_last_step_s(ranks, self.silent_s)
        return HangCandidate(silent_s, after_s, self.longest_gap_s, (*dead, *blocking), waiting, unknown)

    def _after_s(
        self, left: Sequence[WatchedRank], waiting: Sequence[WatchedRank], dead: Sequence[WatchedRank]
    ) -> float:
        tuning = self._tuning
        user_limit_s = self._user_limit_s
        after_s = (
            max(tuning.after_s, tuning.longest_gap_factor * self.longest_gap_s)
            if user_limit_s is None
            else user_limit_s
        )
        if not self._steps_seen or any(rank.ended for rank in left):
            if user_limit_s is not None and waiting and not any(rank.alone for rank in left):
                return user_limit_s
            return max(after_s * tuning.before_first_factor, tuning.min_before_first_s)
        if waiting and any(
            rank.end and (rank.end["signal"] is not None or rank.end["code"]) for rank in dead
        ):
            return min(after_s, tuning.after_death_s)
        if any(rank.busy and not rank.waits for rank in left) and _have_exhausted_data(left):
            return after_s * tuning.after_last_factor
        if any(rank.phase in LONG_PHASES and not rank.waits for rank in left):
            return after_s * tuning.long_phase_factor
        return after_s


def since_last_step_s(ranks: Sequence[WatchedRank], silent_s: float) -> float:
    """Seconds since a rank of this host finished a step, by the ranks' own record; at least ``silent_s``. They are more if other progress
    was seen since, or if this process has taken over from another launcher's."""
    last_ns = max((rank.last_step_ns for rank in ranks if rank.last_step_ns is not None), default=None)
    return silent_s if last_ns is None else max(silent_s, (time.time_ns() - last_ns) / 1e9)


def _by_state(
    ranks: Sequence[WatchedRank],
) -> tuple[list[WatchedRank], tuple[WatchedRank, ...], tuple[WatchedRank, ...]]:
    """(Running ranks, those of them that wait for others, ranks that died)."""
    # While ranks wait in init_process_group, they may wait for a rank that has ended its process group. So that rank counts as running.
    joining = any(rank.alive and rank.phase == Phase.RENDEZVOUS for rank in ranks)
    left = [rank for rank in ranks if rank.alive and (joining or not rank.ended)]
    waiting = tuple(rank for rank in left if rank.waits)
    dead = tuple(rank for rank in ranks if not rank.alive and not rank.ended_well)
    return left, waiting, dead


def _has_new_sign(
    before: dict[tuple[int, int], tuple[Any, ...]], now: dict[tuple[int, int], tuple[Any, ...]]
) -> bool:
    """Whether the signs of progress of any rank have changed. That signs disappear, or appear for the first time, is no progress."""
    return any(signs and before.get(key) not in (None, (), signs) for key, signs in now.items())


def _have_exhausted_data(ranks: Sequence[WatchedRank]) -> bool:
    """Whether all ranks have exhausted their data in the step in progress."""
    return all(rank.progress.get("exhausted") is True for rank in ranks)


Line = tuple[int, int, str]
"""Rank, process id, and the rank's current line of the job's code."""
_BETWEEN_PROOFS_S = 60.0
"""Minimum time between the two polls that must both prove the hang before the job is ended (less if ``--hang-after`` is shorter). The
report is written between the two, because it can show more while the job still runs."""


def find_doubts(
    ranks: Sequence[WatchedRank],
    has_answered: Callable[[WatchedRank], bool],
    *,
    has_other_hosts: bool = False,
) -> list[str]:
    """Reasons not to end the job, one clause for each doubt about a rank; empty if it is proven that no rank makes progress.
    ``has_other_hosts``: other hosts have ranks of the job, too."""
    alive = [rank for rank in ranks if rank.alive]
    found = [(rank, _doubt(rank, has_answered)) for rank in alive]
    is_waited_for = any(rank.waits for rank in alive)
    if has_other_hosts:
        found += [
            (rank, "sleeps, and may wait for another host")
            for rank in alive
            if not rank.waits and _may_wait_for_other_host(rank, is_waited_for)
        ]
    if all(rank.waits for rank in alive):
        # What looks like a wait for others may be a wait for a computation on the rank's own device: a thread that waits for CUDA uses a
        # core, too.
        found += [
            (rank, "may compute on its device") for rank in alive if rank.busy and not rank.waits_in_call
        ]
    return [f"rank {rank.rank} {doubt}" for rank, doubt in found if doubt]


def _may_wait_for_other_host(rank: WatchedRank, is_waited_for: bool) -> bool:
    """Whether a rank that reports no wait may wait for something that a rank of another host makes, such as a file: it sleeps, as between
    two looks; or no rank of this host waits for it, and it does not wait for a lock or a thread of its own process."""
    return rank.sleeps or not (is_waited_for or rank.waits_for_own_thread)


def _doubt(rank: WatchedRank, has_answered: Callable[[WatchedRank], bool]) -> str | None:
    activity = rank.activity
    if activity is Activity.HELD:
        return "is stopped, in a debugger, or waits for input"
    # A rank may move data although it reports that it waits.
    if activity is Activity.WORKS or rank.meter.moves:
        return "reads, writes or computes"
    if rank.state == "D":
        return "waits for storage"
    if activity is Activity.COMPUTES:
        return "uses a processor"
    if rank.holds_gil:
        return None  # it cannot answer, but faulthandler has written its stack
    if activity is Activity.UNKNOWN or not rank.is_known:
        return "does not show what it does"
    return "has not answered" if rank.joined and not has_answered(rank) else None


def current_lines(ranks: Sequence[WatchedRank]) -> frozenset[Line]:
    """Current lines of code of the ranks that do not wait for others. If the job hangs, these lines do not change between two polls."""
    return frozenset((*rank.key, rank.where()) for rank in ranks if rank.alive and not rank.waits)


class KillDecision:
    """Decides when ``--on-hang kill`` ends the job: after two polls in a row that prove the hang, at least ``_BETWEEN_PROOFS_S`` apart
    (less if ``--hang-after`` is shorter)."""

    def __init__(self, after_s: float) -> None:
        self._between_polls_s = min(after_s, _BETWEEN_PROOFS_S)
        self._declared_s = self._polled_s = time.monotonic()
        self._is_proven = False
        """Whether the last poll proved the hang."""
        self._lines: frozenset[Line] = frozenset()
        self.is_doubt_reported = False
        """Whether the user was warned why the job is not ended."""

    def is_due(self, being_diagnosed: bool) -> bool:
        """Whether it is time for the next poll. ``being_diagnosed``: the report is still being written; it gets ``_BETWEEN_PROOFS_S`` from
        the declaration of the hang."""
        now_s = time.monotonic()
        if being_diagnosed and now_s - self._declared_s < _BETWEEN_PROOFS_S:
            return False
        return now_s - self._polled_s >= self._between_polls_s

    def restart(self) -> None:
        """Start again because a rank has made progress: two further polls have to prove the hang."""
        self._is_proven = False

    def evaluate(self, doubts: list[str], current: list[WatchedRank]) -> bool:
        """Evaluate a poll. Returns whether it is the second in a row that proves the hang, and all ranks are at the same lines as in the
        first."""
        self._polled_s, before, self._lines = time.monotonic(), self._lines, current_lines(current)
        was_proven, self._is_proven = self._is_proven, not doubts
        return self._is_proven and was_proven and before == self._lines


_LEAST_TOLD_S = 3.0
"""Shortest pause that a message states: a pause is known to a period of the polls (1 s) only, at either end."""
_MOST_NAMED = 3
"""Ranks listed individually in a message; the report lists all."""


def hang_sentences(candidate: HangCandidate, here: str) -> list[str]:
    """Two sentences: that the job seems to hang, and where each rank is. ``here``: " of this host" if other hosts have ranks, too."""
    longest_s = candidate.longest_gap_s
    before = f" (its longest pause before was about {longest_s:.0f} s)" if longest_s >= _LEAST_TOLD_S else ""
    none_joined = not any(rank.joined for rank in (*candidate.blocking, *candidate.waiting))
    what = "joined its process group" if none_joined else "finished a step"
    since = f"no rank{here} has {what} for {_seconds(candidate.silent_s)}{before}"
    computing = [rank for rank in candidate.blocking if rank.computes]
    or_not = f", or rank {computing[0].rank} computes for long" if computing else ""
    if here and not (candidate.blocking and candidate.waiting):
        or_not = ", or ranks of other hosts work"
    return [f"{since}: the job seems to hang{or_not}.", _blocking_sentence(candidate)]


def unseen_sentence(candidate: HangCandidate, unseen: int) -> str:
    """A message if some ranks of this host wait, and ``unseen`` others have not imported torch yet: what they do is unknown."""
    subject = "a rank of this host has" if unseen == 1 else f"{unseen} ranks of this host have"
    return (
        f"no rank has joined its process group for {candidate.silent_s:.0f} s, and {subject} not imported torch yet: it is unknown "
        "whether the job hangs."
    )


def unknown_sentence(candidate: HangCandidate, here: str) -> str:
    """Message that no step has been finished for a long time, and why it is unknown whether the job hangs."""
    return (
        f"no rank{here} has finished a step for {_seconds(candidate.silent_s)}; whether the job hangs is not known: "
        f"{_listed(candidate.unknown)}."
    )


def elsewhere_sentence(silent_s: float, computing: Sequence[WatchedRank]) -> str:
    """Message that no step has been finished for a long time, that ranks of other hosts may wait for this host, and which of its ranks
    compute."""
    return f"no rank of this host has finished a step for {_seconds(silent_s)}; ranks of other hosts may wait for it: {_listed(computing)}."


def uncounted_sentence(silent_s: float, ranks: Sequence[WatchedRank]) -> str:
    """Message that no step has been finished for a long time, and that waits of the ranks' devices for each other are not visible."""
    why = "torch counts no collectives of these ranks, so a wait on a device looks like a computation"
    return f"no rank has finished a step for {_seconds(silent_s)}; whether the job hangs is not known ({why}): {_listed(ranks)}."


def _blocking_sentence(candidate: HangCandidate) -> str:
    if not candidate.blocking:
        return f"all ranks wait for others: {_listed(candidate.waiting)}."
    waiting = ", ".join(str(rank.rank) for rank in candidate.waiting[:8])
    more = " ..." if len(candidate.waiting) > 8 else ""
    many = len(candidate.waiting) > 1
    rest = f"; rank{'s' if many else ''} {waiting}{more} wait{'' if many else 's'}" if waiting else ""
    return f"{_listed(candidate.blocking)}{rest}."


def _listed(ranks: Sequence[WatchedRank]) -> str:
    listed = "; ".join(map(_rank_clause, ranks[:_MOST_NAMED]))
    return listed + (f"; and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else "")


def _rank_clause(rank: WatchedRank) -> str:
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
    action = (
        "computing" if rank.activity is Activity.COMPUTES else _phase_clause(phase_words(rank.phase) or "")
    )
    place = rank.where()
    return f"{whom} is {f'at {place} ' if place else ''}in step {rank.steps}{f', {action}' if action else ''}"


def _phase_clause(words: str) -> str:
    return words if not words or words.partition(" ")[0].endswith("ing") else f"in {words}"


def _seconds(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} minutes"
