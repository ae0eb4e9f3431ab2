"""Facts of memory from made recordings: who grows, who holds more, what is left, and what a cache could be."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from ddpdoctor.measure.memory import memory_of
from ddpdoctor.measure.steplog import Event, RankLog, Step
from ddpdoctor.rundir.reader import RankRecord

SECOND = 10**9
MB = 1 << 20
GB = 1 << 30
STEP_S = 0.5


class Host:
    """Telemetry of one host, read each second: of ranks, and of the host, the readings of each field."""

    def __init__(self, seconds, ranks=None, *, total=64 * GB, free=None, limit=None, gpus=(), **readings):
        self.header = {"host_facts": {"memory_total_bytes": total, "cgroup_memory_limit_bytes": limit}}
        self.gpus, self.seconds, self._ranks, self._gpu = list(gpus), seconds, ranks or {}, readings
        self._host = {
            "memory_available_bytes": 40 * GB,
            **({"cgroup_memory_free_bytes": free} if free is not None else {}),
        }

    def host_column(self, field):
        return self._column(self._host.get(field))

    @property
    def ranks(self):
        return sorted(self._ranks)

    def rank_column(self, rank, field):
        return self._column(self._ranks.get(rank, {}).get(field))

    def gpu_column(self, index, field):
        return self._column(self._gpu.get(field, {}).get(index))

    def _column(self, values):
        times = np.arange(self.seconds, dtype=np.int64) * SECOND
        return times, np.zeros(self.seconds) + (np.nan if values is None else np.asarray(values, float))


def log(rank, seconds, *, tmp=None, loader=None, passes=1.0, world=2, lengths=None, **info):
    """Two steps a second, or of ``lengths`` in seconds; of a ``loader`` a batch in each, ``passes`` times over its data."""
    count = int(seconds / STEP_S) if lengths is None else len(lengths)
    ends = np.cumsum(np.full(count, STEP_S) if lengths is None else lengths)
    at = [0, *(int(end * SECOND) for end in ends)]
    events = (Event("data", 0, 1000, loader=0),) if loader is not None else ()
    steps = [Step(n, at[n], at[n + 1], events, (), None, None) for n in range(count)]
    loaders = [] if loader is None else [{"id": 0, "batches_per_epoch": int(count / passes), **loader}]
    told = {"device": "cpu", "host": "a", "world_size": world, "loaders": loaders, **info}
    return RankLog(rank, RankRecord(str(tmp or "/nonexistent"), rank, told), tuple(steps))


def line(seconds, start, per_s):
    return start + per_s * np.arange(seconds)


def test_the_rank_that_grows_is_told_with_its_slope_and_when_the_host_is_full():
    ranks = {0: {"process_memory_bytes": GB}, 1: {"process_memory_bytes": line(200, GB, 10 * MB)}}
    found = memory_of([log(0, 200), log(1, 200)], {"a": Host(200, ranks)}).facts
    assert found.process.ranks == [1] and found.workers is None and found.device is None
    assert found.process.fastest_rank == 1 and found.process.bytes_per_step == pytest.approx(5 * MB)
    assert found.process.bytes_per_hour == pytest.approx(36_000 * MB)
    assert found.process.full_in_hours == pytest.approx(40 * GB / (36_000 * MB))
    assert not found.process.may_be_cache
    assert found.watched_hours == pytest.approx(160 / 3600, rel=0.02)


def test_all_that_grows_on_a_host_fills_it_and_a_control_group_may_be_tighter():
    ranks = {rank: {"process_memory_bytes": line(200, GB, 10 * MB)} for rank in (0, 1)}
    host = Host(200, ranks, free=5 * GB, limit=16 * GB)
    found = memory_of([log(0, 200), log(1, 200)], {"a": host}).facts
    assert found.process.full_in_hours == pytest.approx(5 * GB / (72_000 * MB))
    assert (found.limit_bytes, found.headroom_bytes) == (16 * GB, 2.5 * GB)
    assert found.headroom_share == pytest.approx(5 / 16)


def test_workers_are_told_apart_from_their_rank():
    children = {"children_memory_bytes": line(200, GB, 8 * MB), "num_children": 2}
    loader = {"num_workers": 2, "persistent_workers": True}
    host = Host(200, {0: {"process_memory_bytes": GB, **children}})
    found = memory_of([log(0, 200, loader=loader, passes=0.2, world=1)], {"a": host}).facts
    assert found.process is None and found.workers.ranks == [0]
    assert found.workers.may_be_cache, "the first pass is not over"
    many = memory_of([log(0, 200, loader={"shuffle": False, **loader}, passes=8, world=1)], {"a": host}).facts
    assert not many.workers.may_be_cache


def test_workers_that_inherit_what_their_rank_leaks_do_not_leak_themselves():
    grows = line(200, GB, 10 * MB)
    children = {"children_memory_bytes": 2 * grows, "num_children": 2}
    host = Host(200, {0: {"process_memory_bytes": grows, **children}})
    found = memory_of([log(0, 200, loader={"num_workers": 2}, world=1)], {"a": host}).facts
    assert found.process.ranks == [0] and found.workers is None


def test_what_fills_in_the_first_pass_is_not_looked_at():
    filled = np.minimum(line(200, GB, 40 * MB), 4 * GB)
    host = Host(200, {0: {"process_memory_bytes": filled}})
    found = memory_of(
        [log(0, 200, loader={"num_workers": 0, "shuffle": False}, passes=2, world=1)], {"a": host}
    )
    assert found.facts.process is None and found.facts.watched_hours == pytest.approx(100 / 3600, rel=0.03)


def test_growth_in_a_first_pass_that_is_not_over_may_be_a_cache_of_the_process():
    host = Host(200, {0: {"process_memory_bytes": line(200, GB, 10 * MB)}})
    for workers, may_be in ((0, True), (2, False)):
        job = log(0, 200, loader={"num_workers": workers}, passes=0.5, world=1)
        assert memory_of([job], {"a": host}).facts.process.may_be_cache is may_be


@pytest.mark.parametrize(("workers", "field"), [(0, "process_memory_bytes"), (2, "children_memory_bytes")])
def test_a_cache_of_shuffled_data_that_slows_down_is_none_however_many_passes_were_seen(workers, field):
    """Four processes that each read another part in each pass: what is new falls by a quarter from pass to pass."""
    ranks, passes = (4, 5.0) if not workers else (2, 5.0)
    cached = GB + 20 * GB * (1 - 0.75 ** (np.arange(200) / 40))
    readings = {"process_memory_bytes": GB, "num_children": workers, field: cached}
    loader = {"num_workers": workers, "sampler": "DistributedSampler", "shuffle": True}
    jobs = [log(rank, 200, loader=loader, passes=passes, world=ranks) for rank in range(ranks)]
    found = memory_of(jobs, {"a": Host(200, dict.fromkeys(range(ranks), readings))}).facts
    assert found.process is found.workers is None and found.watched_hours is not None


def steps_done(lengths, seconds):
    """At each reading."""
    ends = np.concatenate(([0.0], np.cumsum(lengths)))
    return np.interp(np.arange(seconds), ends, np.arange(len(ends)))


def even(step_s, seconds=200):
    return np.full(int(seconds / step_s), step_s)


def test_a_step_in_slow_motion_is_no_growth():
    """Steps of nearly the sampling interval: each reading is taken a little later in its step than the one before."""
    seen = GB + 2 * GB * (np.arange(200) % 0.998)
    job = log(0, 200, lengths=even(0.998), world=1)
    found = memory_of([job], {"a": Host(200, {0: {"process_memory_bytes": seen}})}).facts
    assert found.process is None and found.watched_hours is None


@pytest.mark.parametrize("step_s", [0.05005, 0.0503, 0.251, 0.985, 1.03, 3.1])
def test_readings_that_go_through_steps_several_times_are_of_use(step_s):
    """Even steps at even intervals, as real jobs have: neighbouring readings are of nearly the same moment of a step, but what a step
    takes and gives back comes round again."""
    lengths, swing = even(step_s), 100 * MB
    done = steps_done(lengths, 200)
    takes = GB + swing * np.sin(np.pi * (done % 1.0))
    for leak, told in ((0.0, None), (3 * GB / done[-1], [0])):
        host = Host(200, {0: {"process_memory_bytes": takes + leak * done}})
        found = memory_of([log(0, 200, lengths=lengths, world=1)], {"a": host}).facts
        assert found.watched_hours is not None
        assert (found.process and found.process.ranks) == told
        if told:
            assert found.process.bytes_per_step == pytest.approx(leak, rel=0.2)


SLOWED = np.concatenate((np.full(1000, 0.1), np.full(200, 0.5)))
HASTENED = SLOWED[::-1]


@pytest.mark.parametrize("lengths", [SLOWED, HASTENED])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_leak_is_told_by_its_steps_though_the_machine_slows_them_down(lengths, workers):
    done = steps_done(lengths, 200)
    field = "children_memory_bytes" if workers else "process_memory_bytes"
    readings = {"process_memory_bytes": GB, "num_children": workers, field: GB + 3 * MB * done}
    loader = {"num_workers": workers, "shuffle": False, "persistent_workers": True}
    job = log(0, 200, lengths=lengths, loader=loader, passes=0.2, world=1)
    found = memory_of([job], {"a": Host(200, {0: readings})}).facts
    growth = found.workers if workers else found.process
    assert growth.bytes_per_step == pytest.approx(3 * MB, rel=0.05)
    # By the clock it is told at the pace of all the time that was watched.
    assert growth.bytes_per_hour == pytest.approx(3 * MB * np.ptp(done[40:]) / 160 * 3600, rel=0.1)
    assert growth.low_bytes_per_hour <= growth.bytes_per_hour <= growth.high_bytes_per_hour


def test_steps_that_were_thinned_out_count_all_the_same():
    whole = log(0, 200, lengths=SLOWED, world=1)
    thin = RankLog(0, whole.record, tuple(step for step in whole.steps if step.number % 100 < 30))
    grows = {0: {"process_memory_bytes": GB + 3 * MB * steps_done(SLOWED, 200)}}
    found = memory_of([thin], {"a": Host(200, grows)}).facts
    assert found.process.bytes_per_step == pytest.approx(3 * MB, rel=0.1)


@pytest.mark.parametrize("first_pass_s", [10, 45, 70, 100, 190])
def test_workers_that_begin_anew_with_each_pass_give_back_what_they_held(first_pass_s):
    steps = int(first_pass_s / STEP_S)
    done = steps_done(even(STEP_S), 200)
    children = {"children_memory_bytes": GB + 8 * MB * (done % steps), "num_children": 2}
    host = Host(200, {0: {"process_memory_bytes": GB, **children}})
    loader = {"num_workers": 2, "shuffle": False, "persistent_workers": False}
    job = log(0, 200, loader=loader, passes=400 / steps, world=1)
    found = memory_of([job], {"a": host}).facts
    assert found.watched_hours is not None and found.workers is None


def growing_workers(passes, *, free=40 * GB, ranks=1, **loader):
    """5 MiB a step in each rank's workers."""
    children = {"children_memory_bytes": line(200, GB, 10 * MB), "num_children": 2}
    host = Host(
        200, {rank: {"process_memory_bytes": GB, **children} for rank in range(ranks)}, free=free, limit=free
    )
    jobs = [
        log(rank, 200, loader={"num_workers": 2, **loader}, passes=passes, world=ranks)
        for rank in range(ranks)
    ]
    return memory_of(jobs, {"a": host}).facts.workers


def test_what_a_cache_can_still_add_is_bounded_by_the_data_set():
    kept = {"persistent_workers": True}
    found = growing_workers(0.2, shuffle=False, **kept)
    # 400 of 2,000 steps are done.
    assert found.may_be_cache and not found.ends_with_pass
    assert found.bounded_bytes == pytest.approx(1600 * 5 * MB, rel=0.05) and found.bound_fits
    tight = growing_workers(0.2, shuffle=False, free=5 * GB, **kept)
    assert tight.bound_fits is False and tight.free_bytes == 5 * GB
    # Each of two workers reads half of the data in a pass, and some of the other half in the next ones.
    assert growing_workers(0.2, shuffle=True, **kept).bounded_bytes == pytest.approx(3600 * 5 * MB, rel=0.05)
    second = growing_workers(1.25, shuffle=True, **kept)
    assert second.bounded_bytes == pytest.approx((240 + 320) * 5 * MB, rel=0.05)
    both = growing_workers(0.2, shuffle=True, sampler="DistributedSampler", ranks=2, **kept)
    assert both.bounded_bytes == pytest.approx(2 * (1600 + 3 * 2000) * 5 * MB, rel=0.05)
    unknown = growing_workers(0.2, shuffle=False, batches_per_epoch=None, **kept)
    assert unknown.may_be_cache and unknown.bounded_bytes is unknown.bound_fits is None
    leak = growing_workers(8, shuffle=False, **kept)
    assert not leak.may_be_cache and leak.bounded_bytes is None


def test_workers_that_end_with_the_pass_grow_until_then():
    found = growing_workers(0.2, shuffle=True, persistent_workers=False)
    assert found.ends_with_pass and found.bounded_bytes == pytest.approx(1600 * 5 * MB, rel=0.05)


def test_readings_of_an_earlier_process_of_the_rank_do_not_count():
    grows = np.concatenate([np.full(100, GB), line(100, 3 * GB, 0)])
    pids = np.repeat([7, 8], 100)
    host = Host(200, {0: {"process_memory_bytes": grows, "pid": pids}})
    found = memory_of([log(0, 200, world=1, pid=8)], {"a": host})
    assert found.ranks[0].process_bytes == 3 * GB


def test_a_rank_that_holds_more_is_named():
    ranks = {rank: {"process_memory_bytes": GB * (4 if rank == 2 else 1)} for rank in range(4)}
    found = memory_of([log(rank, 60, world=4) for rank in range(4)], {"a": Host(60, ranks)}).facts
    assert (found.heavy_ranks, found.most_bytes, found.typical_bytes) == ([2], 4 * GB, GB)
    assert found.on_device is False and found.heaviest_rank == 2


def test_short_recordings_and_missing_telemetry_are_unknown():
    ranks = {rank: {"process_memory_bytes": line(10, GB, 100 * MB)} for rank in (0, 1)}
    short = memory_of([log(0, 10), log(1, 10)], {"a": Host(10, ranks)}).facts
    assert short.watched_hours is short.process is short.most_bytes is None
    nothing = memory_of([log(0, 200), log(1, 200)], {})
    assert nothing.facts.watched_hours is nothing.facts.headroom_bytes is None and nothing.ranks == {}
    assert memory_of([], {}).facts.on_device is None


def device_log(tmp_path, rank, seconds, allocated, **more):
    """A rank with what its hook looked at: in turn in the forward, the backward and the optimizer."""
    folder = tmp_path / str(rank)
    folder.mkdir()
    lines = [{"schema": "ddpdoctor.memory/1", "device": f"cuda:{rank}", "total_bytes": 80 * GB}]
    for second in range(seconds):
        phase = ("forward", "backward", "optimizer")[second % 3]
        held = int(allocated[second]) + {"forward": 10 * GB, "backward": 20 * GB}.get(phase, 0)
        counters = {"allocated_bytes": held, "reserved_bytes": 40 * GB, "reserved_peak_bytes": 40 * GB}
        lines.append({"t_ns": second * SECOND, "step": 2 * second, "phase": phase, **counters, **more})
    (folder / "memory.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return log(rank, seconds, tmp=folder, device=f"cuda:{rank}")


def test_a_device_tells_its_phases_and_what_a_batch_can_grow_to(tmp_path):
    jobs = [device_log(tmp_path, rank, 120, np.full(120, 10 * GB), retries=rank) for rank in (0, 1)]
    found = memory_of(jobs, {})
    facts = found.facts
    assert found.ranks[0].phase_peak_bytes == {"backward": 30 * GB, "forward": 20 * GB, "optimizer": 10 * GB}
    assert (facts.allocated_peak_bytes, facts.reserved_peak_bytes) == (30 * GB, 40 * GB)
    assert (facts.headroom_bytes, facts.headroom_share, facts.limit_bytes) == (40 * GB, 0.5, 80 * GB)
    assert facts.batch_times == pytest.approx(1 + 0.9 * 40 / 20)
    assert facts.allocation_retries == 1 and facts.on_device and facts.device is None
    assert found.ranks[1].reserved_peak_bytes == 40 * GB and found.notes == []


def test_retries_that_go_on_are_told_apart_from_those_at_the_start(tmp_path):
    """The counter of rank 0 stops at 9 retries; that of rank 1 goes on, twice in each of 119 readings two steps apart."""
    jobs = [device_log(tmp_path, rank, 120, np.full(120, 10 * GB)) for rank in (0, 1)]
    for rank, counted in ((0, lambda second: min(second, 9)), (1, lambda second: 2 * second)):
        file = tmp_path / str(rank) / "memory.jsonl"
        head, *looks = map(json.loads, file.read_text().splitlines())
        looks = [{**look, "retries": counted(second)} for second, look in enumerate(looks)]
        file.write_text("".join(json.dumps(each) + "\n" for each in (head, *looks)))
    facts = memory_of(jobs, {}).facts
    assert (facts.allocation_retries, facts.lasting_retries, facts.steps_per_retry) == (238, 118, 1.0)
    alone = memory_of(jobs[:1], {}).facts
    assert (alone.allocation_retries, alone.lasting_retries, alone.steps_per_retry) == (9, 0, None)


def test_tensors_that_grow_on_a_device_are_told(tmp_path):
    job = device_log(tmp_path, 0, 120, line(120, 10 * GB, 20 * MB))
    growth = memory_of([job], {}).facts.device
    assert growth.ranks == [0] and growth.bytes_per_step == pytest.approx(10 * MB, rel=0.1)
    assert growth.full_in_hours == pytest.approx(
        (80 * GB - growth.held_bytes) / growth.bytes_per_hour, rel=0.3
    )


def test_odd_lines_are_counted_and_left_out(tmp_path):
    job = device_log(tmp_path, 0, 120, np.full(120, 10 * GB))
    file = tmp_path / "0" / "memory.jsonl"
    file.write_text(file.read_text() + '{"t_ns":-1}\nnoise\n[]\n{"t_ns":1e99,"allocated_bytes":1}\n')
    found = memory_of([job], {})
    assert found.facts.allocated_peak_bytes == 30 * GB
    assert found.notes == [f"{file}: 4 broken lines left out."]


def with_lines(tmp_path, change):
    """What is found, and noted, where ``change`` has been at the lines of the file."""
    job = device_log(tmp_path, 0, 120, np.full(120, 10 * GB))
    file = tmp_path / "0" / "memory.jsonl"
    lines = [json.loads(each) for each in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(each) + "\n" for each in change(lines)))
    other = log(1, 120, device="cuda:1", world=2)
    found = memory_of([job, other], {"a": Host(120, {1: {"process_memory_bytes": GB}})})
    assert found.ranks[1].process_bytes == GB, "the rest is analysed"
    return found.ranks.get(0), found.notes, file


@pytest.mark.parametrize("schema", [None, "ddpdoctor.memory/2", 7, "x" * 1000])
def test_a_file_without_its_schema_is_ignored_and_named(tmp_path, schema):
    def change(lines):
        return [{**lines[0], "schema": schema}, *lines[1:]]

    told, notes, file = with_lines(tmp_path, change)
    assert told is None
    assert notes == [f"{file} does not begin with a line of ddpdoctor.memory/1 and is ignored."]


def test_looks_without_a_first_line_are_ignored(tmp_path):
    told, notes, file = with_lines(tmp_path, lambda lines: lines[1:])
    assert told is None and notes[0].startswith(f"{file} does not begin")


@pytest.mark.parametrize("info", [{"device": "cpu", "ended_ns": 1}, {"device": "cuda:0", "ended_ns": None}])
@pytest.mark.parametrize("there", [True, False])
def test_a_rank_that_recorded_no_look_yet_or_has_no_device_lost_nothing(tmp_path, info, there):
    if there:
        (tmp_path / "memory.jsonl").write_bytes(b"")
    recorded = log(0, 120, tmp=tmp_path, **info)
    waits = msgspec.structs.replace(recorded, record=replace(recorded.record, spool=str(tmp_path)))
    assert memory_of([waits], {}).notes == []


def test_looks_that_a_rank_on_a_device_lost_are_told(tmp_path):
    (tmp_path / "memory.jsonl").write_bytes(b"")
    (note,) = memory_of([log(0, 120, tmp=tmp_path, device="cuda:0", ended_ns=1)], {}).notes
    assert "does not begin with a line of ddpdoctor.memory/1" in note


@pytest.mark.parametrize("size", [0, 1, 9 * GB])
def test_a_device_that_is_smaller_than_what_it_holds_has_no_size(tmp_path, size):
    told, notes, file = with_lines(tmp_path, lambda lines: [{**lines[0], "total_bytes": size}, *lines[1:]])
    assert told.device_total_bytes is None and told.allocated_peak_bytes == 30 * GB
    assert notes == [
        f"{file}: the device's size, {size:,} bytes, is too small for what it holds, and is ignored."
    ]


@pytest.mark.parametrize(
    "odd",
    [
        {"allocated_bytes": 81 * GB},
        {"reserved_peak_bytes": 2**49},
        {"allocated_bytes": -1},
        {"allocated_bytes": 2**60},
        {"allocated_bytes": "much"},
        {"allocated_bytes": None},
        {"t_ns": None},
    ],
)
def test_a_look_that_no_device_can_give_is_left_out(tmp_path, odd):
    told, notes, file = with_lines(tmp_path, lambda lines: [*lines[:60], {**lines[60], **odd}, *lines[61:]])
    assert (told.allocated_peak_bytes, told.reserved_peak_bytes) == (30 * GB, 40 * GB)
    assert notes == [f"{file}: 1 broken line left out."]


def test_a_link_in_its_place_is_not_followed_and_named(tmp_path):
    job = device_log(tmp_path, 0, 120, np.full(120, 10 * GB))
    file = tmp_path / "0" / "memory.jsonl"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    (note,) = memory_of([job], {}).notes
    assert note.startswith(f"{file} cannot be read: ")


def test_what_others_hold_of_the_device_is_no_headroom(tmp_path):
    gpu = {"index": 0, "uuid": "GPU-x", "memory_total_bytes": 80 * GB}
    host = Host(120, gpus=[gpu], memory_used_bytes={0: 72 * GB})
    job = device_log(tmp_path, 0, 120, np.full(120, 10 * GB))
    found = memory_of([job], {"a": host}).facts
    assert found.headroom_share == pytest.approx(0.1)


def test_a_job_on_devices_without_counters_has_no_headroom_of_its_host():
    host = Host(60, {0: {"process_memory_bytes": GB}})
    facts = memory_of([log(0, 60, device="cuda:0", world=1)], {"a": host}).facts
    assert facts.headroom_bytes is facts.on_device is None


class SetClock(Host):
    """The clock of the readings is ``ahead_s`` further after 100 s."""

    ahead_s = 0

    def _column(self, values):
        times, held = super()._column(values)
        return times + self.ahead_s * SECOND * (times >= 100 * SECOND), held


@pytest.mark.parametrize(("ahead_s", "of_readings_s"), [(3600, 3600), (-50, 0)], ids=["slept", "set back"])
def test_a_clock_that_was_set_changes_nothing(ahead_s, of_readings_s):
    """Steps are on monotonic time, readings on the wall clock, of which the reader of telemetry has undone backward steps."""
    ranks = {0: {"process_memory_bytes": line(200, GB, 10 * MB)}}
    host = SetClock(200, ranks, free=line(200, 20 * GB, -10 * MB), limit=32 * GB)
    usual = log(0, 200, world=1)
    expected = memory_of([usual], {"a": host}).facts
    host.ahead_s = of_readings_s
    steps = [
        msgspec.structs.replace(step, moved_ns=-ahead_s * SECOND * (step.number >= 200))
        for step in usual.steps
    ]
    found = memory_of([RankLog(0, usual.record, tuple(steps))], {"a": host}).facts
    assert expected.process is not None and found == expected
