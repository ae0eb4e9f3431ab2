"""Alignment gives new logs: those that it was given stay as they were recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from ddpdoctor.measure.align import align_logs, exclude_suspended, use_monotonic_time
from ddpdoctor.measure.steplog import SUSPENDED, RankLog, read_logs
from ddpdoctor.rundir.reader import RankRecord, RunDirectory
from tests.measure.clocks import length_of, set_clock, start_of, suspend
from tests.measure.recorded import Job, record

S = 1_000_000_000
HOSTS = ("a", "a", "b", "b")


def logs_of(folder: Path) -> list[RankLog]:
    return [log for run in read_logs([RunDirectory.open(str(folder))]) for log in run.logs]


def times(logs):
    return [[(step.start_ns, step.end_ns, step.marks) for step in log.steps] for log in logs]


def arrivals(log):
    return [point.arrival_ns for point in log.sync_points]


def test_a_clock_that_was_set(tmp_path):
    folder = record(tmp_path / "run", Job(world=2, steps=60))
    set_clock(folder, (start_of(folder, 30) + length_of(folder, 30) // 3, 40 * S))
    recorded = logs_of(folder)
    before, early = times(recorded), arrivals(recorded[0])
    ordered, notes = use_monotonic_time(recorded)
    assert len(notes) == 1 and times(recorded) == before and arrivals(recorded[0]) == early
    moved = [step.moved_ns for step in ordered[0].steps]
    assert moved[:31] == [0] * 31 and moved[31:] == [-40 * S] * 29
    assert arrivals(ordered[0])[-1] == early[-1] - 40 * S
    assert all(new.events is old.events for new, old in zip(ordered[0].steps, recorded[0].steps, strict=True))


def test_hosts_whose_clocks_differ(tmp_path):
    recorded = logs_of(record(tmp_path / "run", Job(hosts=HOSTS, offset_ns={"b": 3 * S}, steps=60)))
    before = times(recorded)
    aligned, notes = align_logs(recorded)
    assert len(notes) == 1 and times(recorded) == before
    assert [new is old for new, old in zip(aligned, recorded, strict=True)] == [True, True, False, False]
    assert aligned[2].steps[0].start_ns == pytest.approx(aligned[0].steps[0].start_ns, abs=1e6)
    assert aligned[2].steps[0].moved_ns == pytest.approx(-3 * S, abs=1e6)


def test_a_rank_that_was_stopped(tmp_path):
    folder = record(tmp_path / "run", Job(world=2, steps=60))
    suspend(folder, 30, 3600 * S, (1,))
    recorded, _ = use_monotonic_time(logs_of(folder))
    before = times(recorded)
    marked, notes = exclude_suspended(recorded, {})
    assert len(notes) == 1 and times(recorded) == before
    stopped = [[step.number for step in log.steps if SUSPENDED in step.marks] for log in marked]
    assert 30 in stopped[0] + stopped[1]


def test_nothing_of_a_log_can_be_set(tmp_path):
    (log,) = logs_of(record(tmp_path / "run", Job(world=1, steps=4)))
    for frozen, name in ((log, "steps"), (log.steps[0], "start_ns"), (log.steps[0].events[0], "start_ns")):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(frozen, name, 0)


def test_what_follows_from_a_log_is_found_once(tmp_path):
    (log,) = logs_of(record(tmp_path / "run", Job(world=1, steps=4)))
    assert log.sync_points is log.sync_points and log.activities is log.activities
    assert log.activities.since(log.start_ns) is log.activities
    later = log.activities.since(log.start_ns - 500)
    for name, (starts, ends) in log.activities.sets.items():
        assert (later.sets[name][0] == starts + 500).all() and (later.sets[name][1] == ends + 500).all()


def without_syncs(log, steps):
    """The log as of a rank that has no part in the collectives of these steps."""
    given = (replace(step, events=()) if step.number in steps else step for step in log.steps)
    return replace(log, steps=tuple(given))


def test_the_first_ranks_of_hosts_need_not_share_collectives(tmp_path):
    given = logs_of(record(tmp_path / "run", Job(hosts=HOSTS, offset_ns={"b": 3 * S}, steps=40)))
    logs = [without_syncs(log, range(40) if log.rank in (0, 2) else ()) for log in given]
    aligned, _ = align_logs(logs)
    assert [log.steps[0].moved_ns for log in aligned] == pytest.approx([0, 0, -3 * S, -3 * S], abs=1e6)


def test_hosts_are_aligned_through_a_third(tmp_path):
    """Host c shares collectives with b only, and b with both."""
    offsets = {"b": 3 * S, "c": -7 * S}
    given = logs_of(
        record(tmp_path / "run", Job(world=3, hosts=("a", "b", "c"), offset_ns=offsets, steps=40))
    )
    apart = {0: range(0, 40, 2), 1: (), 2: range(1, 40, 2)}
    aligned, notes = align_logs([without_syncs(log, apart[log.rank]) for log in given])
    assert [log.steps[0].moved_ns for log in aligned] == pytest.approx([0, -3 * S, 7 * S], abs=1e6)
    assert len(notes) == 2 and "-7000.0" in notes[1]


@pytest.mark.parametrize(("offset_ns", "told"), [(20_000_000, []), (5 * S, ["about +5.0 s"])])
def test_of_hosts_that_issue_work_to_devices_only_a_far_offset_is_one_of_their_clocks(
    tmp_path, offset_ns, told
):
    """A host goes on when it has issued a reduction: 20 ms may be how far it is ahead of the other one, 5 s are not."""
    given = logs_of(record(tmp_path / "run", Job(hosts=HOSTS, offset_ns={"b": offset_ns}, steps=60)))
    devices = {"device": "cuda"}
    logs = [replace(log, record=RankRecord("", log.rank, log.record.info | devices)) for log in given]
    aligned, notes = align_logs(logs)
    assert len(notes) == len(told) and all(part in note for part, note in zip(told, notes, strict=True))
    assert [log.steps[0].moved_ns for log in aligned] == pytest.approx(
        [0, 0, -offset_ns, -offset_ns], abs=1e6
    )
