"""When a job is said to stand still: by what its ranks show, its own history, and what the user asked for."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from ddpdoctor.launch.hang_detection import HangCandidate, ProgressTracker, Tuning, hang_sentences
from ddpdoctor.launch.rankwatch import Activity, WatchedRank
from ddpdoctor.launch.unjoined import UnjoinedRank
from ddpdoctor.rundir.heartbeat import Beat
from ddpdoctor.rundir.host_files import UnjoinedStatus

WAITS = {"0": [36, -1, 35]}
DONE = {"0": [35, -1, 35]}


def a_rank(number: int, phase: str = "other", groups: Any = None, **fields: Any) -> WatchedRank:
    """A rank that answers, in the midst of its job."""
    rank = WatchedRank("", number, 1_000_000_000 + number, steps=30, state="S")
    rank.beat = Beat(1, 1, 30, 1, 1, 0, 0, 0)
    rank.heard_s = math.inf
    rank.progress = {
        "phase": phase,
        "groups": DONE if groups is None else groups,
        **fields,
    }
    return rank


def waiting(number: int) -> WatchedRank:
    return a_rank(number, "backward", WAITS)


def after(
    ranks: list[WatchedRank], seconds: float, asked_s: float | None = 10.0, gaps: tuple[float, ...] = (1.0,)
) -> HangCandidate | None:
    """What is thought of ``ranks`` that have shown nothing for ``seconds``, after steps with ``gaps`` between them."""
    progress = ProgressTracker(asked_s, Tuning())
    now_s = 0.0
    progress.update(now_s, True, ranks)
    for gap in gaps:
        now_s = silent(progress, ranks, now_s, gap)
        progress.update(now_s, True, ranks)
    silent(progress, ranks, now_s, seconds)
    return progress.hang_candidate(ranks)


def silent(progress: ProgressTracker, ranks: list[WatchedRank], now_s: float, seconds: float) -> float:
    ends_s = now_s + seconds
    while now_s < ends_s:
        now_s = min(now_s + 1.0, ends_s)
        progress.update(now_s, False, ranks)
    return now_s


def test_the_one_that_does_not_wait_is_named() -> None:
    found = after([waiting(0), a_rank(1), waiting(2)], 11)
    assert found is not None
    assert [rank.rank for rank in found.blocking] == [1] and [rank.rank for rank in found.waiting] == [0, 2]


def test_of_one_that_does_not_answer_nothing_is_known() -> None:
    silent_one = a_rank(1)
    silent_one.heard_s = 0.0
    found = after([waiting(0), silent_one], 11)
    assert found is not None and [rank.rank for rank in found.unknown] == [1]


def test_one_whose_lock_is_kept_is_named_by_what_faulthandler_wrote() -> None:
    silent_one = a_rank(1)
    silent_one.heard_s, silent_one._faults = 0.0, "Stack (most recent call first):\n"
    found = after([waiting(0), silent_one], 11)
    assert found is not None and not found.unknown
    assert [rank.rank for rank in found.blocking] == [1] and silent_one.holds_gil


def test_not_before_the_time_that_was_asked_for() -> None:
    assert after([waiting(0), a_rank(1)], 9) is None


@pytest.mark.parametrize(("silent_s", "told"), [(290, False), (310, False), (390, False), (410, True)])
def test_by_default_the_jobs_own_longest_pause_counts(silent_s: float, told: bool) -> None:
    assert (after([waiting(0), a_rank(1)], silent_s, None, (1.0, 40.0, 2.0)) is not None) is told


@pytest.mark.parametrize(
    ("gaps_s", "told"), [((1.0, 1.0, 2.0), ""), ((1.0, 4.0, 2.0), "its longest pause before was about 4 s")]
)
def test_a_pause_shorter_than_the_polls_can_tell_is_not_stated(gaps_s: tuple[float, ...], told: str) -> None:
    """A poll a second finds a second between the steps of any job that is faster."""
    found = after([waiting(0), a_rank(1)], 12, 10.0, gaps_s)
    assert found is not None
    sentence = hang_sentences(found, "")[0]
    assert told in sentence and ("longest pause" in sentence) is bool(told)


def test_what_is_told_is_the_time_since_the_last_step() -> None:
    """Of one that takes over the watch, and of a hang that follows an evaluation."""
    ranks = [waiting(0), a_rank(1)]
    ranks[1].last_step_ns = time.time_ns() - 500 * 10**9
    found = after(ranks, 12, 10.0)
    assert found is not None and 499.0 < found.silent_s < 510.0 and found.after_s == 10.0


def test_before_the_first_step_there_is_more_time_for_who_works() -> None:
    ranks = [waiting(0), a_rank(1)]
    ranks[1].meter.cores = 1.0
    progress = ProgressTracker(10.0, Tuning())
    assert silent(progress, ranks, 0.0, 55) and progress.hang_candidate(ranks) is None
    silent(progress, ranks, 55.0, 20)
    assert progress.hang_candidate(ranks) is not None


def test_before_the_first_step_who_asked_for_less_has_it_where_nobody_works() -> None:
    ranks = [waiting(0), a_rank(1)]
    progress = ProgressTracker(10.0, Tuning())
    assert silent(progress, ranks, 0.0, 9) and progress.hang_candidate(ranks) is None
    silent(progress, ranks, 9.0, 2)
    found = progress.hang_candidate(ranks)
    assert found is not None and [rank.rank for rank in found.blocking] == [1]


def test_one_that_computes_alone_is_no_suspect_and_still_long_without_a_step() -> None:
    """Ranks of another host may wait for it."""
    busy = a_rank(0)
    busy.meter.cores = 1.0
    progress = ProgressTracker(10.0, Tuning())
    progress.update(0.0, True, [busy])
    silent(progress, [busy], 0.0, 9)
    assert not progress.is_long([busy])
    silent(progress, [busy], 9.0, 3)
    assert progress.is_long([busy]) and progress.hang_candidate([busy]) is None


def test_as_long_as_nobody_waits_those_that_have_not_joined_are_building() -> None:
    ranks: list[WatchedRank] = [UnjoinedRank("", number, 1_000_000_000 + number) for number in (0, 1)]
    progress = ProgressTracker(10.0, Tuning())
    now_s = silent(progress, ranks, 0.0, 1000)
    assert progress.hang_candidate(ranks) is None
    ranks[0].said = UnjoinedStatus({"joining_ns": 1})  # type: ignore[attr-defined]
    silent(progress, ranks, now_s, 12)
    found = progress.hang_candidate(ranks)
    assert found is not None
    assert ([rank.rank for rank in found.blocking], [rank.rank for rank in found.waiting]) == ([1], [0])


def test_who_comes_to_join_makes_progress() -> None:
    """What it built before has taken longer than ranks may wait for each other."""
    ranks = [UnjoinedRank("", number, 1_000_000_000 + number, state="S") for number in (0, 1)]
    for rank in ranks:
        rank.meter.cores = 1.0
    ranks[1].said = UnjoinedStatus({"joining_ns": 1})
    progress = ProgressTracker(3.0, Tuning())
    now_s = silent(progress, list(ranks), 0.0, 30)
    assert progress.hang_candidate(list(ranks)) is None
    ranks[0].said, ranks[0].meter.cores = UnjoinedStatus({"joining_ns": 2}), 0.0
    now_s = silent(progress, list(ranks), now_s, 3)
    assert progress.hang_candidate(list(ranks)) is None
    silent(progress, list(ranks), now_s, 2)
    assert progress.hang_candidate(list(ranks)) is not None


def test_who_is_suspended_is_waited_for() -> None:
    stopped = a_rank(1)
    stopped.state = "T"
    assert after([waiting(0), stopped], 80) is None
    found = after([waiting(0), stopped], 110)
    assert found is not None and [rank.rank for rank in found.blocking] == [1]


@pytest.mark.parametrize("phase", ["evaluation", "save", "load"])
def test_phases_that_take_long_in_healthy_jobs_are_given_longer(phase: str) -> None:
    """Nothing shows that they get on: slow storage, or a computation elsewhere."""
    quiet = a_rank(1, phase)
    assert after([waiting(0), quiet], 45) is None
    assert after([waiting(0), quiet], 55) is not None


def test_who_evaluates_does_not_wait_whatever_it_has_on_its_way() -> None:
    assert not a_rank(0, "evaluation", WAITS).waits


@pytest.mark.parametrize(
    "fields",
    [
        {"phase": "evaluation", "evaluating": True},
        {"phase": "data", "evaluating": True},
        {"phase": "save"},
        {"phase": "compile"},
        {"phase": "debugger"},
    ],
)
def test_who_gets_on_within_the_step_does_not_hang(fields: dict[str, Any]) -> None:
    busy = a_rank(1, **fields)
    busy.meter.cores = 1.0
    assert after([waiting(0), busy], 100) is None


def test_metrics_between_two_forwards() -> None:
    busy = a_rank(1, "evaluation", evaluating=True)
    busy.meter.cores = 1.0
    assert busy.activity is Activity.WORKS
    busy.progress["phase"] = "other"
    assert after([waiting(0), busy], 80) is None
    busy.progress["evaluating"] = False
    assert busy.activity is Activity.COMPUTES


@pytest.mark.parametrize("phase", ["save", "data", "evaluation"])
def test_who_is_there_and_does_nothing_hangs(phase: str) -> None:
    assert after([waiting(0), a_rank(1, phase, evaluating=True)], 100) is not None


def test_a_python_loop_that_others_wait_for() -> None:
    busy = a_rank(1)
    busy.meter.cores = 1.0
    assert after([waiting(0), busy], 11) is not None


def test_nobody_is_kept_waiting_by_who_works() -> None:
    busy = a_rank(0)
    busy.meter.cores = 1.0
    assert after([busy], 100) is None


def test_an_export_after_the_last_pass() -> None:
    export, other = a_rank(0, exhausted=True), a_rank(1, "barrier", WAITS, exhausted=True)
    export.meter.cores = 1.0
    assert after([export, other], 30) is None
    assert after([export, other], 50) is not None
    other.ended = True
    assert after([export, other], 500) is None


def test_what_ranks_do_within_a_step_counts() -> None:
    ranks = [waiting(0), a_rank(1, events=0)]
    progress = ProgressTracker(10.0, Tuning())
    progress.update(0.0, True, ranks)
    progress.update(1.0, True, ranks)
    for second in range(2, 60):
        ranks[1].progress["events"] = second
        progress.update(float(second), False, ranks)
    assert progress.hang_candidate(ranks) is None


def test_a_watch_that_was_suspended_itself_counts_little_of_that() -> None:
    ranks = [waiting(0), a_rank(1)]
    progress = ProgressTracker(10.0, Tuning())
    for now_s, stepped in ((0.0, True), (1.0, True), (500.0, False), (501.0, False)):
        progress.update(now_s, stepped, ranks)
    assert progress.hang_candidate(ranks) is None


def test_ranks_that_do_nothing_once_another_has_died_hang() -> None:
    """What they wait for may be of no kind that is known, as a key in a store; with one that ended in order, it may be the job's end."""
    dead, through = a_rank(1), a_rank(1)
    dead.end = {"signal": 9, "code": None, "in_order": False}
    through.end = {"signal": None, "code": 0, "in_order": True}
    left = [a_rank(0), a_rank(2)]
    found = after([*left, dead], 301, None)
    assert found is not None and found.blocking == (dead, *left) and not found.waiting
    assert after([*left, through], 1000, None) is None
    left[0].meter.cores = 1.0
    assert after([*left, dead], 1000, None) is None


@pytest.mark.parametrize("end", [{"signal": 9, "code": None}, {"signal": None, "code": 1}])
def test_a_dead_rank_is_not_waited_for_long(end: dict[str, Any]) -> None:
    dead = a_rank(1)
    dead.end = {**end, "in_order": False}
    found = after([waiting(0), dead], 35, None)
    assert found is not None and [rank.rank for rank in found.blocking] == [1]


def test_a_rank_whose_steps_cannot_be_counted_is_never_silent() -> None:
    uncounted = a_rank(1)
    uncounted.beat = None
    assert after([waiting(0), uncounted], 1000) is None


def between_trainings(number: int, **fields: Any) -> WatchedRank:
    """A rank that has ended its process group and is to join another one."""
    rank = a_rank(number, **fields)
    rank.ended = True
    return rank


def test_who_has_ended_its_process_group_is_awaited_in_the_next() -> None:
    joining, idle = a_rank(0, "rendezvous"), between_trainings(1)
    found = after([joining, idle], 11)
    assert found is not None and (found.blocking, found.waiting) == ((idle,), (joining,))


def test_it_has_the_time_of_a_start_while_it_works() -> None:
    joining, busy = a_rank(0, "rendezvous"), between_trainings(1)
    busy.state = "R"
    assert after([joining, busy], 59) is None and after([joining, busy], 61) is not None


def test_whoever_ended_its_process_group_is_no_suspect_where_none_joins() -> None:
    assert after([between_trainings(0), between_trainings(1)], 1_000) is None
