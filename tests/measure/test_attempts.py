"""The attempts of a run, and what restarts cost: steps done again, detection, the next start."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ddpdoctor.measure.steplog import Event, RankLog, Step
from ddpdoctor.measure.wholerun import AttemptRecord, attempt_facts, restart_facts
from ddpdoctor.rundir.reader import RankRecord
from ddpdoctor.rundir.stepevents import EventKind

MS, S = 1_000_000, 1_000_000_000


def attempt(
    start_s: float, steps: int, events: dict[int, EventKind] | None = None, **fields
) -> AttemptRecord:
    """Steps of 20 ms of one rank, after a first one of a second."""
    now, taken = round(start_s * S), []
    for number in range(steps):
        end = now + (S if number == 0 else 20 * MS)
        kind = (events or {}).get(number)
        own = () if kind is None else (Event(kind, 0, MS),)
        taken.append(Step(number, now, end, own, (), 0, 0))
        now = end
    log = RankLog(0, RankRecord("", 0, {}), tuple(taken))
    ended_ns = fields.pop("ended_ns", now + S)
    return AttemptRecord(logs=[log], started_ns=round(start_s * S), ended_ns=ended_ns, **fields)


def test_what_was_lost_between_two_attempts() -> None:
    first = attempt(
        10.0, 291, {100: EventKind.SAVE, 200: EventKind.SAVE}, failed_ns=17 * S, ended_ns=20 * S, ranks=[1]
    )
    second = attempt(25.0, 200, {0: EventKind.LOAD}, failed_ns=None)
    lost = restart_facts([first, second])
    assert (lost.count, lost.ranks, lost.repeated_steps) == (1, [1], 91)
    assert lost.repeated_s == pytest.approx(91 * 0.02)
    assert (lost.detection_s, lost.start_s) == (3.0, 6.0)
    assert lost.total_s == pytest.approx(lost.repeated_s + 9.0)
    told = attempt_facts([first, second], 2 * S)
    assert [(each.number, each.started_s, each.steps) for each in told] == [(1, 8.0, 291), (2, 23.0, 200)]
    assert [each.checkpoint_step for each in told] == [200, None]


def test_of_three_attempts_all_that_failed_count() -> None:
    records = [
        attempt(10.0, 50, failed_ns=13 * S, ranks=[1], ended="rank 1 raised ValueError"),
        attempt(20.0, 80, {0: EventKind.LOAD}, failed_ns=24 * S, ranks=[2], ended="rank 2 raised OSError"),
        attempt(30.0, 90, {0: EventKind.LOAD}, failed_ns=None),
    ]
    lost = restart_facts(records)
    assert (lost.count, lost.ended, lost.repeated_steps) == (2, "rank 2 raised OSError", 50 + 80)


def test_a_checkpoint_in_a_step_that_did_not_end() -> None:
    """It holds all steps before; the attempt after it, which saves none, starts there."""
    first = attempt(10.0, 75, {50: EventKind.SAVE}, failed_ns=13 * S)
    first = replace(first, logs=[replace(log, saved=75) for log in first.logs])
    records = [first, attempt(20.0, 15, failed_ns=24 * S), attempt(30.0, 90, failed_ns=None)]
    assert [each.checkpoint_step for each in attempt_facts(records, None)] == [75, None, None]
    assert restart_facts(records).repeated_steps == 0 + 15


def test_an_attempt_before_the_first_checkpoint_of_a_job_that_saves() -> None:
    lost = restart_facts(
        [attempt(10.0, 50, failed_ns=13 * S), attempt(20.0, 80, {60: EventKind.SAVE}, failed_ns=None)]
    )
    assert lost.repeated_steps == 50


def test_attempts_without_a_recording_count_as_restarts() -> None:
    records = [attempt(10.0, 50, failed_ns=13 * S), attempt(20.0, 80, failed_ns=None, unrecorded=2)]
    assert restart_facts(records).count == 3


def test_a_job_that_saves_by_other_means() -> None:
    lost = restart_facts([attempt(10.0, 50, failed_ns=13 * S), attempt(20.0, 80, failed_ns=None)])
    assert lost.repeated_steps is None and lost.repeated_s is None and lost.total_s > 0


def test_jobs_one_after_the_other_are_no_restarts() -> None:
    records = [attempt(10.0, 50, failed_ns=None), attempt(20.0, 80, failed_ns=None)]
    assert restart_facts(records) is None and len(attempt_facts(records, None)) == 2
    assert attempt_facts(records[:1], None) == []


def test_an_attempt_that_took_no_step() -> None:
    lost = restart_facts([attempt(10.0, 0, failed_ns=13 * S), attempt(20.0, 80, failed_ns=None)])
    assert lost.count == 1 and lost.repeated_steps is None
