"""Step logs → facts: run directories of every shape a job leaves behind, read through the same door as the command."""

from __future__ import annotations

import pytest

from tests.measure.recorded import Job, late_facts, measured, plant, record
from tests.measure.steplogs import log_of, thin

STEP_MS = 19.5
"""Of the healthy job: 2 data + 0.5 host + 5 forward + 10 backward + 1 transfer + 1 optimizer."""


def only_culprit(found, cause, ranks, ms, tolerance=0.05):
    late = late_facts(found)
    assert set(late) == {cause, "total"}
    assert late[cause].ranks == ranks
    assert late[cause].ms_per_step == pytest.approx(ms, abs=tolerance)
    return late[cause]


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_a_healthy_job(tmp_path, world):
    found, notes = measured(record(tmp_path / "run", Job(world)))
    assert late_facts(found) == {} and notes == []
    steps = found.facts.steps
    assert (steps.source, steps.seen, steps.measured) == ("step-log", 30, 27)
    assert steps.mean_ms == pytest.approx(STEP_MS) and steps.median_ms == pytest.approx(STEP_MS)
    assert steps.samples_per_s == pytest.approx(32 * world / (STEP_MS / 1e3))
    assert steps.batch_size == 32 and steps.batch_size_most == 1.0 and steps.micro_batches == 1
    assert found.facts.communication.transfer_ms == pytest.approx(1.0)
    assert found.facts.communication.wait_ms == pytest.approx(0.0, abs=1e-6)
    assert found.facts.breakdown["compute"] == pytest.approx(16 / STEP_MS)
    assert found.facts.breakdown["data_wait"] == pytest.approx(2 / STEP_MS)


@pytest.mark.parametrize(
    ("phase", "cause"),
    [
        ("data", "data"),
        ("host", "host"),
        ("forward", "compute"),
        ("backward", "compute"),
        ("optimizer", "optimizer"),
        ("gc", "collection"),
        ("save", "checkpoint"),
    ],
)
@pytest.mark.parametrize("world", [2, 4])
def test_a_late_rank_and_its_cause(tmp_path, phase, cause, world):
    found, _ = measured(record(tmp_path / "run", Job(world, extra=plant(world - 1, **{phase: 6.0}))))
    cost = only_culprit(found, cause, [world - 1], 6.0)
    assert cost.persistence == "always" and cost.speedup == pytest.approx((STEP_MS + 6) / STEP_MS, abs=0.01)
    assert found.facts.communication.wait_ms == pytest.approx(6.0 * (world - 1) / world, abs=0.01)
    assert found.facts.communication.transfer_ms == pytest.approx(1.0, abs=0.01)
    caused = [rank.caused_wait_ms for rank in found.drawn.ranks]
    assert caused == pytest.approx([0.0] * (world - 1) + [6.0], abs=0.01)


def test_source_lines_of_the_cause(tmp_path):
    found, _ = measured(record(tmp_path / "run", Job(extra=plant(2, data=6.0))))
    (where,) = late_facts(found)["data"].where
    assert (where.file, where.line, where.function) == ("train.py", 20, "main")


def test_every_fifth_step(tmp_path):
    found, _ = measured(record(tmp_path / "run", Job(steps=63, extra=plant(1, every=5, save=40.0))))
    cost = only_culprit(found, "checkpoint", [1], 8.0)
    assert (cost.persistence, cost.period_steps, cost.steps_hit, cost.steps_seen) == ("periodic", 5, 12, 60)
    assert cost.occurrence_ms == pytest.approx(40.0)


def test_breakdown_of_each_rank_adds_up_to_its_step(tmp_path):
    job = Job(metric="blocking", barrier=True, extra=plant(2, host=3.0, gc=2.0))
    found, _ = measured(record(tmp_path / "run", job))
    for rank in found.drawn.ranks:
        assert sum(rank.breakdown_ms.values()) == pytest.approx(found.facts.steps.mean_ms, rel=0.01)
    assert sum(found.facts.breakdown.values()) == pytest.approx(1.0)


def test_a_rank_without_a_recording(tmp_path):
    job = Job(extra=plant(2, data=6.0))
    victim, _ = measured(record(tmp_path / "victim", job, missing=(0,)))
    assert only_culprit(victim, "data", [2], 6.0).ranks == [2] and victim.graphs.primary.ranks == (1, 2, 3)
    culprit, _ = measured(record(tmp_path / "culprit", job, missing=(2,)))
    assert late_facts(culprit) == {}, "the others are punctual"
    # Nobody at hand was late: what they waited for is part of the transfer's upper bound.
    assert culprit.facts.steps.mean_ms == pytest.approx(STEP_MS + 6.0)


def test_a_rank_that_ended_early_limits_what_is_measured(tmp_path):
    folder = record(tmp_path / "run", Job(extra=plant(2, data=6.0)))
    lines = log_of(folder, 3).read_text().splitlines(keepends=True)
    log_of(folder, 3).write_text("".join(lines[:-10]))
    found, _ = measured(folder)
    assert found.facts.steps.measured == 17 and found.graphs.primary.set_aside["missing on a rank"] == 10
    only_culprit(found, "data", [2], 6.0)


def test_a_last_line_that_was_cut(tmp_path):
    folder = record(tmp_path / "run", Job(extra=plant(2, data=6.0)))
    whole = log_of(folder, 1).read_bytes()
    log_of(folder, 1).write_bytes(whole[:-40])
    found, notes = measured(folder)
    assert notes == [] and found.facts.steps.measured == 26, "a job that runs, or was killed, is no error"
    only_culprit(found, "data", [2], 6.0)


def test_a_broken_line_is_told_and_costs_only_its_step(tmp_path):
    folder = record(tmp_path / "run", Job(extra=plant(2, data=6.0)))
    lines = log_of(folder, 1).read_text().splitlines(keepends=True)
    log_of(folder, 1).write_text("".join([*lines[:18], '{"step": 14, "t": [1,\n', *lines[19:]]))
    found, notes = measured(folder)
    assert len(notes) == 1 and "1 broken line" in notes[0] and str(log_of(folder, 1)) in notes[0]
    # Its own step, and the one behind it, whose cycle would begin in it.
    assert found.facts.steps.measured == 25
    only_culprit(found, "data", [2], 6.0)


def test_a_restarted_job_is_measured_by_the_attempt_that_recorded_most(tmp_path):
    job = Job(extra=plant(2, data=6.0))
    folder = record(tmp_path / "run", job.changed(steps=6, extra=plant(0, host=50.0)))
    record(folder, job.changed(attempt=1))
    found, notes = measured(folder)
    assert found.facts.steps.seen == 30 and len(notes) == 1
    only_culprit(found, "data", [2], 6.0)


@pytest.mark.parametrize("offset_ns", [500_000, -3_000_000_000, 7_200_000_000_000])
@pytest.mark.parametrize("drift_ppm", [0.0, 100.0])
def test_two_hosts_whose_clocks_differ(tmp_path, offset_ns, drift_ppm):
    hosts = ("a", "a", "b", "b")
    job = Job(hosts=hosts, offset_ns={"b": offset_ns}, drift_ppm={"b": drift_ppm}, steps=120)
    healthy, notes = measured(record(tmp_path / "healthy", job))
    assert late_facts(healthy) == {} and len(notes) == 1 and notes[0].startswith("Clock of host b:")
    late, _ = measured(record(tmp_path / "late", job.changed(extra=plant(3, host=4.0))))
    only_culprit(late, "host", [3], 4.0, tolerance=0.1)
    assert late.facts.communication.transfer_ms == pytest.approx(1.0, abs=0.05)


def test_runs_of_two_hosts_in_two_folders(tmp_path):
    job = Job(hosts=("a", "a", "b", "b"), offset_ns={"b": 2_000_000_000}, extra=plant(3, data=6.0))
    a, b = (record(tmp_path / name, job, missing=gone) for name, gone in (("a", (2, 3)), ("b", (0, 1))))
    found, _ = measured(a, b)
    assert found.graphs.primary.ranks == (0, 1, 2, 3)
    only_culprit(found, "data", [3], 6.0)


@pytest.mark.parametrize("no_sync", [True, False])
def test_gradient_accumulation(tmp_path, no_sync):
    job = Job(accumulation=3, no_sync=no_sync, extra=plant(2, data=6.0))
    found, _ = measured(record(tmp_path / "run", job))
    only_culprit(found, "data", [2], 6.0)
    steps = found.facts.steps
    assert steps.micro_batches == 3 and steps.batch_size == 32
    assert found.facts.buckets.syncs_per_step == (1 if no_sync else 3)
    redundant = found.facts.shared.redundant_sync
    if no_sync:
        assert redundant is None
    else:
        assert redundant.ms_per_step == pytest.approx(2.0, abs=0.05), "two transfers of 1 ms too many"


def test_metrics_reduced_from_python(tmp_path):
    found, _ = measured(record(tmp_path / "run", Job(metric="blocking", extra=plant(2, host=5.0))))
    only_culprit(found, "host", [2], 5.0)
    cost = found.facts.shared.collective
    assert cost is not None and cost.ms_per_step == pytest.approx(0.2, abs=0.05)
    assert cost.operation == "all_reduce" and (cost.where[0].file, cost.where[0].line) == ("train.py", 31)
    assert found.facts.buckets.collectives_per_step == 1


@pytest.mark.parametrize(
    ("folder", "told"), [("/home/me", True), ("/env/lib/python3.11/site-packages/lightning", False)]
)
def test_where_a_loader_was_built_unless_by_a_framework(tmp_path, folder, told):
    run = record(tmp_path / "run", Job(2))
    for rank in (0, 1):
        steps = log_of(run, rank)
        steps.write_text(steps.read_text().replace("train.py", f"{folder}/train.py"))
    found, _ = measured(run)
    assert (found.facts.loader.where is not None) == told


def test_gathering_sharded_parameters_is_no_metric(tmp_path):
    job = Job(ddp=False, gather=3.0, metric="blocking", extra=plant(2, host=5.0))
    found, _ = measured(record(tmp_path / "run", job))
    shared = found.facts.shared
    assert shared.model_communication.ms_per_step == pytest.approx(3.0, abs=0.01)
    assert shared.collective.ms_per_step == pytest.approx(0.2, abs=0.01)
    assert shared.collective.operation == "all_reduce"
    only_culprit(found, "host", [2], 5.0)


@pytest.mark.parametrize("in_flight", [1, 4])
def test_asynchronous_metrics_are_met_where_they_are_waited_for(tmp_path, in_flight):
    job = Job(metric="async", in_flight=in_flight, extra=plant(2, host=5.0))
    found, _ = measured(record(tmp_path / "run", job))
    only_culprit(found, "host", [2], 5.0)
    assert found.graphs.primary.unmatched == 0 and found.facts.buckets.collectives_per_step == in_flight
    assert found.facts.shared.collective.ms_per_step == pytest.approx(0.2 * in_flight, abs=0.02)


def test_two_ranks_of_two_are_late_for_two_causes(tmp_path):
    """Rank 1 waits 16 ms for data, rank 0 spends 10 ms on Python work: without both a step is 16 ms shorter."""
    extra = {0: {"host": 10.0}, 1: {"data": 16.0}}
    found, _ = measured(record(tmp_path / "run", Job(world=2, extra=lambda rank, step: extra[rank])))
    late = found.facts.late
    assert late.data.ranks == [1] and late.host.ranks == [0]
    assert late.data.ms_per_step == pytest.approx((6 + 16) / 2, rel=0.02)
    assert late.host.ms_per_step == pytest.approx((0 + 10) / 2, rel=0.02)
    assert late.host.remaining_ms_per_step == pytest.approx(10, rel=0.02)
    assert late.total.ms_per_step == pytest.approx(16, rel=0.02)


def test_a_barrier_in_every_step_is_no_rank_s_fault(tmp_path):
    """Rank 0 works before the barrier, rank 1 behind it."""
    job = Job(2, barrier=True, extra=lambda rank, step: {"host": 6.0} if rank == 0 else {"forward": 6.0})
    found, _ = measured(record(tmp_path / "run", job))
    assert late_facts(found) == {}
    assert found.facts.shared.barrier.ms_per_step == pytest.approx(6.05, abs=0.05)
    assert found.facts.buckets.barriers_per_step == 1


def test_gradients_averaged_by_hand(tmp_path):
    found, _ = measured(record(tmp_path / "run", Job(ddp=False, extra=plant(1, data=6.0))))
    only_culprit(found, "data", [1], 6.0)
    assert found.facts.job.is_ddp is False and found.facts.buckets.syncs_per_step == 1
    assert found.facts.shared.communication.ms_per_step == pytest.approx(1.0, abs=0.05)


def test_buffers_broadcast_while_another_rank_is_late(tmp_path):
    found, _ = measured(record(tmp_path / "run", Job(buffers=True, extra=plant(2, data=6.0))))
    only_culprit(found, "data", [2], 6.0)


def test_buffers_broadcast_while_the_root_is_late(tmp_path):
    """All others wait for rank 0 before their forward: that is no work of theirs."""
    found, _ = measured(record(tmp_path / "run", Job(buffers=True, extra=plant(0, data=6.0))))
    only_culprit(found, "data", [0], 6.0)


@pytest.mark.parametrize("world", (2, 4))
def test_workers_that_are_all_too_slow_accuse_no_rank(tmp_path, world):
    """The slowest by a hair waits for every batch; the others' workers gain a reserve. All are too slow."""
    paces = [60.0, 61.0, 60.5, 60.2]
    job = Job(world=world, steps=120, data=0.1, worker=lambda rank: paces[rank])
    found, _ = measured(record(tmp_path / "run", job))
    mean_ms, without_ms = found.facts.steps.mean_ms, 0.1 + 0.5 + 5.0 + 10.0 + 1.0 + 1.0
    assert mean_ms == pytest.approx(61.0, rel=0.01)
    assert found.facts.shared.data.ms_per_step == pytest.approx(mean_ms - without_ms, rel=0.06)
    late = found.facts.late.data
    assert late is None or late.ms_per_step < 0.03 * mean_ms


def test_one_rank_s_worker_is_too_slow(tmp_path):
    """The others' workers keep up with steps of 17.6 ms; rank 1's take 60 ms for a batch."""
    job = Job(world=4, steps=120, data=0.1, worker=lambda rank: 60.0 if rank == 1 else 15.0)
    found, _ = measured(record(tmp_path / "run", job))
    assert found.facts.late.data.ranks == [1]
    assert found.facts.late.data.ms_per_step == pytest.approx(60.0 - 17.6, rel=0.02)
    common = found.facts.shared.data
    assert common is None or common.ms_per_step < 0.2


def test_new_workers_beside_each_evaluation(tmp_path):
    """The steps that evaluate say nothing of training, but the stall of the training loader in them does."""
    job = Job(world=2, steps=81, epoch=20, restart=300.0)
    found, _ = measured(record(tmp_path / "run", job))
    stall = found.facts.shared.data_epoch_start
    each = job.data + job.restart + 1.0
    assert stall.occurrence_ms == pytest.approx(each) and stall.period_steps == 20
    assert stall.steps_hit == 4 and stall.ms_per_step == pytest.approx(4 * each / stall.steps_seen)
    assert stall.speedup == pytest.approx(1 + stall.ms_per_step / found.facts.steps.mean_ms)
    quiet, _ = measured(record(tmp_path / "persistent", job.changed(restart=0.0)))
    assert quiet.facts.shared.data_epoch_start.ms_per_step < 0.2


def test_new_workers_beside_evaluations_of_which_only_the_times_are_kept(tmp_path):
    job = Job(world=2, steps=403, epoch=10, restart=300.0)
    folder = record(tmp_path / "run", job)
    thin(folder, range(2), lambda step: step >= 40 and step // 8 % 4 > 0)
    found, _ = measured(folder)
    each = job.data + job.restart + 1.0
    assert found.facts.shared.data_epoch_start.ms_per_step == pytest.approx(each / 10, rel=0.15)


def test_larger_batches_of_one_rank(tmp_path):
    job = Job(batch=lambda rank: 48 if rank == 1 else 32, extra=plant(1, forward=2.5, backward=5.0))
    found, _ = measured(record(tmp_path / "run", job))
    only_culprit(found, "uneven", [1], 7.5)
    assert found.facts.steps.batch_size_most == 1.5


def test_a_single_rank(tmp_path):
    found, _ = measured(record(tmp_path / "run", Job(1, transfer=0.0)))
    assert late_facts(found) == {}
    assert found.facts.steps.mean_ms == pytest.approx(18.5) and found.facts.steps.measured == 27
    assert found.facts.shared.data.ms_per_step == pytest.approx(2.0)


@pytest.mark.parametrize("world", [1, 3])
def test_steps_of_ranks_that_never_meet(tmp_path, world):
    run = record(tmp_path / "run", Job(world, ddp=False, transfer=0.0))
    for rank in range(world):
        log_of(run, rank).write_text(log_of(run, rank).read_text().replace('"k": "coll"', '"k": "gc"'))
    found, _ = measured(run)
    assert found.facts.steps.mean_ms == pytest.approx(18.5) and late_facts(found) == {}
    assert found.facts.steps.measured == 27 and found.facts.communication.matched == 0


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_a_few_steps_only(tmp_path, steps):
    found, _ = measured(record(tmp_path / "run", Job(steps=steps, extra=plant(2, data=9.0))))
    assert found.facts.steps.seen == steps
    late = late_facts(found)
    assert set(late) <= {"data", "total"}
    if steps >= 5:
        assert late["data"].ranks == [2]


def test_no_steps_at_all(tmp_path):
    folder = record(tmp_path / "run", Job(2, steps=4))
    for rank in (0, 1):
        log_of(folder, rank).write_text('{"schema":"ddpdoctor.steps/2"}\n')
    from ddpdoctor.analysis import analyze
    from ddpdoctor.errors import UnusableInput

    with pytest.raises(UnusableInput, match="no rank recorded a step"):
        analyze(str(folder))


def test_thinned_steps_do_not_disturb_the_full_ones(tmp_path):
    folder = record(tmp_path / "run", Job(steps=80, extra=plant(2, data=6.0)))
    thin(folder, range(4), lambda step: step >= 40 and step % 4 > 0)
    found, _ = measured(folder)
    late = late_facts(found)
    assert late["data"].ranks == [2] and late["data"].ms_per_step == pytest.approx(6.0, abs=0.1)
    assert found.facts.steps.mean_ms == pytest.approx(STEP_MS + 6, abs=0.1)
    assert found.facts.steps.batch_size == 32 and found.facts.steps.micro_batches == 1
