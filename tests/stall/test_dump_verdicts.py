"""Who is named in dumps of simulated jobs, of which the guilty are known."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.analysis import analyze
from ddpdoctor.stall import find_dumps
from ddpdoctor.stall.verdict import of_dumps

from .simulated import Job, Op, data_parallel, pipelined, write


def facts_of(folder: Path, job: Job, **how):
    return of_dumps(find_dumps([write(folder, job, **how)])).facts


def named(folder: Path, job: Job, **how) -> list[int] | None:
    facts = facts_of(folder, job, **how)
    stop = facts.not_reached or facts.different
    return stop.ranks if stop else None


GUILTY = [(9, 14), (8,), (15,), (8, 15), (12, 13), (3,), (0,), (1, 6)]


@pytest.mark.parametrize(
    ("guilty", "place"),
    [
        pytest.param(guilty, place, marks=() if (number + turn) % 4 == 0 else pytest.mark.extended)
        for number, guilty in enumerate(GUILTY)
        for turn, place in enumerate([1, 4, 9, 14, 23])
    ],
    ids=str,
)
def test_hosts_that_stop_in_a_pipelined_job(tmp_path, guilty, place):
    job = replace(pipelined(), host_stops=dict.fromkeys(guilty, place))
    assert named(tmp_path / "a", job) == list(guilty)
    assert named(tmp_path / "b", job, only_active=False) == list(guilty)
    assert named(tmp_path / "c", job, form="json") == list(guilty)


@pytest.mark.parametrize("guilty", [(9, 14), (8,), (12, 13), (15,)], ids=str)
def test_ranks_whose_devices_stopped(tmp_path, guilty):
    """Their hosts went on for a few operations, of which nothing notes the end."""
    job = replace(pipelined(), host_stops=dict.fromkeys(guilty, 15), blind=dict.fromkeys(guilty, 12))
    facts = facts_of(tmp_path, job)
    assert facts.not_reached.ranks == list(guilty)
    assert facts.not_reached.doing == "device"


@pytest.mark.parametrize("guilty", [(9, 14), (8,), (0,), (3,), (12, 13)], ids=str)
def test_killed_ranks_leave_no_dump(tmp_path, guilty):
    job = replace(pipelined(), host_stops=dict.fromkeys(guilty, 14), killed=guilty)
    verdict = of_dumps(find_dumps([write(tmp_path, job)]))
    assert verdict.facts.not_reached.ranks == list(guilty)
    assert any("no readable flight recorder dump" in note for note in verdict.notes)
    assert all(each.state == "left no dump" for each in verdict.standing if each.guilty)


@pytest.mark.parametrize("guilty", [(0,), (3,), (8,)], ids=str)
@pytest.mark.parametrize("place", [1, 9])
def test_killed_ranks_are_named_rather_than_those_that_await_their_messages(tmp_path, guilty, place):
    job = replace(pipelined(), host_stops=dict.fromkeys(guilty, place), killed=guilty)
    assert named(tmp_path, job) == list(guilty)


@pytest.mark.parametrize("guilty", [(12, 13), (15,), (9, 14)], ids=str)
@pytest.mark.parametrize("lost", [0, 3, 5, 8, 11])
def test_a_lost_dump_accuses_nobody_where_others_show_who_did_not_come(tmp_path, guilty, lost):
    folder = write(tmp_path, replace(pipelined(), host_stops=dict.fromkeys(guilty, 14)))
    Path(folder, f"_dump_{lost}").unlink()
    assert of_dumps(find_dumps([folder])).facts.not_reached.ranks == list(guilty)


def test_one_of_two_stops_a_little_later_and_waits_for_the_other_itself(tmp_path):
    """Rank 14 issues one collective more than rank 9 before it stops: it waits there, too, but its peers issued more."""
    program = [Op("72", "all_to_all", stream=0) for _ in range(6)]
    groups = {"0": ("default_pg", tuple(range(16))), "72": ("EXPERT", tuple(range(8, 16)))}
    job = Job(groups, {rank: list(program) if rank >= 8 else [] for rank in range(16)}, {9: 2, 14: 3})
    assert named(tmp_path / "a", job) == [9, 14]
    two = {rank: [Op("72", "all_to_all"), Op("38", "all_reduce")] * 4 for rank in range(8, 16)}
    groups["38"] = ("TENSOR", tuple(range(8, 16)))
    job = Job(groups, two | {rank: [] for rank in range(8)}, {9: 4, 14: 5})
    assert named(tmp_path / "b", job) == [9, 14]


def test_a_rank_that_reads_its_loss_alone_waits_as_the_others_do(tmp_path):
    """Rank 0 of each host prints the loss: their hosts stand before those of the others do, and are not at fault."""
    job = data_parallel(16, sync=False)
    reading = [replace(op, sync=op.sizes == (300,)) for op in job.programs[0]]
    job = replace(job, programs=job.programs | {0: reading, 8: reading}, host_stops={5: 8})
    assert named(tmp_path, job) == [5]


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("sync", [True, False])
def test_data_parallel_ranks(tmp_path, world, sync):
    for rank in {0, world - 1}:
        job = replace(data_parallel(world, sync=sync), host_stops={rank: 10})
        assert named(tmp_path / str(rank), job) == [rank]


@pytest.mark.parametrize(
    "without",
    [
        ("pg_config",),
        ("pg_status",),
        ("pg_config", "pg_status"),
        ("retired", "timeout_ms", "is_p2p"),
        ("record_id",),
    ],
    ids=str,
)
def test_older_versions_lack_keys(tmp_path, without):
    job = replace(data_parallel(4), host_stops={2: 10})
    assert named(tmp_path, job, only_active=False, without=without) == [2]


def test_a_ring_that_kept_the_last_entries_only(tmp_path):
    job = replace(data_parallel(4, steps=50), host_stops={2: 100})
    assert named(tmp_path, job, only_active=False, kept=5) == [2]


def test_a_ring_that_has_forgotten_a_group_does_not_say_what_was_not_issued_there(tmp_path):
    """Ranks 2 and 3 have gone on to a group of their own: of the first one their rings hold nothing any more."""
    first, second = Op("0", "all_reduce", sync=True), Op("1", "all_reduce")
    programs = {rank: [first] * 3 if rank < 2 else [first] * 2 + [second] * 30 for rank in range(4)}
    job = Job({"0": ("default_pg", (0, 1, 2, 3)), "1": ("pair", (2, 3))}, programs)
    for kept, kind in ((5, "no recording"), (40, "not issued")):
        how = {"only_active": False, "kept": kept, "without": ("pg_status",)}
        stop = facts_of(tmp_path / str(kept), job, **how).not_reached
        assert stop is not None and (stop.ranks, stop.kind) == ([2, 3], kind)


def with_program(rank: int, program: list[Op], world: int = 3) -> Job:
    job = data_parallel(world)
    return replace(job, programs=job.programs | {rank: program})


def changed(place: int, *ops: Op, instead: int = 0) -> list[Op]:
    program = data_parallel(2).programs[0]
    return [*program[:place], *ops, *program[place + instead :]]


BARRIER = Op("0", "barrier", (1,), sync=True, line=77)


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (changed(9, BARRIER), "operation"),
        (changed(9, Op("0", "all_reduce", (150,), line=77)), "extra"),
        (changed(9, Op("0", "all_reduce", (150,), line=77), instead=1), "shape"),
        (changed(9, Op("0", "all_reduce", (100,), "Half", line=77), instead=1), "dtype"),
        (changed(9, Op("0", "broadcast", (100,), line=77), instead=1), "operation"),
    ],
    ids=["barrier", "extra", "shape", "dtype", "operation"],
)
def test_different_collectives(tmp_path, world, program, kind):
    job = with_program(1, program, world)
    job.device_stops.update(dict.fromkeys(range(world), 9))  # what does not fit does not end
    facts = facts_of(tmp_path, job, only_active=False, frames=True)
    assert facts.different.ranks == [1]
    assert facts.different.sequence == 10
    assert facts.different.where[0].line == 77
    assert facts.different.waits_at[0].line == 120
    assert facts.different.kind == kind


@pytest.mark.parametrize(("steps", "odd"), [(5, [1]), (3, [0]), (7, [0, 1])])
def test_an_evaluation_is_due_after_as_many_steps_as_before(tmp_path, steps, odd):
    """Of two ranks, one evaluates and the other goes on: after five steps, as twice before, the latter is at fault; after three the
    former; after seven nothing shows who."""
    step, evaluation = Op("0", "all_reduce", (300,), line=17), Op("0", "all_reduce", (1,), line=8)
    past = [*[step] * 5, evaluation] * 2 + [step] * steps
    programs = {0: [*past, evaluation], 1: [*past, step]}
    job = Job({"0": ("default_pg", (0, 1))}, programs, device_stops=dict.fromkeys(range(2), len(past)))
    facts = facts_of(tmp_path, job, only_active=False)
    assert (facts.different.ranks, facts.different.sequence) == (odd, len(past) + 1)


def test_two_collectives_in_another_order(tmp_path):
    first, second = Op("0", "all_reduce", (64,), line=31), Op("0", "broadcast", (64,), line=32)
    programs = {rank: [first, second] * 4 for rank in range(4)}
    programs[2] = [*[first, second] * 3, second, first]
    job = Job({"0": ("default_pg", (0, 1, 2, 3))}, programs, device_stops=dict.fromkeys(range(4), 6))
    facts = facts_of(tmp_path, job, only_active=False)
    assert (facts.different.ranks, facts.different.kind) == ([2], "order")


def test_sizes_that_may_differ_are_no_difference(tmp_path):
    """all_to_all has each rank's own sizes."""
    job = replace(pipelined(), host_stops={9: 12})
    assert facts_of(tmp_path, job, only_active=False).different is None


def test_a_device_that_stands_in_a_collective_that_all_issued(tmp_path):
    job = replace(data_parallel(4), device_stops={2: 7})
    facts = facts_of(tmp_path, job)
    assert facts.together.ranks is None
    assert (facts.together.collective, facts.together.sequence) == ("all_reduce", 8)


def test_a_job_that_has_nothing_pending_is_not_accused(tmp_path):
    facts = facts_of(tmp_path / "a", data_parallel(4), only_active=False)
    assert facts.state is None
    said = analyze([write(tmp_path / "b", data_parallel(4), only_active=False)]).verdict.headline
    assert said == "Cannot tell: the flight recorder dumps show no rank that others wait for."


def test_few_dumps_name_nobody(tmp_path):
    job = replace(data_parallel(8), host_stops={5: 10})
    folder = Path(write(tmp_path, job))
    for file in folder.iterdir():
        if file.name not in ("_dump_0", "_dump_1"):
            file.unlink()
    verdict = of_dumps(find_dumps([str(folder)]))
    assert verdict.facts.not_reached is None
    assert any("Collect the dumps of all ranks" in note for note in verdict.notes)


def test_a_message_that_nobody_sends(tmp_path):
    groups = {"0": ("default_pg", (0, 1))}
    programs = {0: [Op("0", "send", peer=1)], 1: [Op("0", "recv", peer=0), Op("0", "recv", peer=0)]}
    facts = facts_of(tmp_path, Job(groups, programs))
    assert facts.not_reached.ranks == [0]
    assert facts.not_reached.waiting_ranks == [1]


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(5, 25))]
)
def test_any_ranks_anywhere(tmp_path, seed):
    """One or two hosts that stop at one place of a stage, whatever the dump holds."""
    dice = random.Random(seed)
    stage = dice.choice([range(8), range(8, 16)])
    guilty = tuple(sorted(dice.sample(list(stage), dice.choice([1, 2]))))
    place = dice.randrange(1, len(pipelined().programs[guilty[0]]))
    job = replace(pipelined(), host_stops=dict.fromkeys(guilty, place))
    how = {"only_active": dice.random() < 0.5, "form": dice.choice(["pickle", "json"])}
    assert named(tmp_path, job, **how) == list(guilty)
