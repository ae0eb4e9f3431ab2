"""What checkpoints cost, all that belongs to them: preparations, and those in steps that the profiler disturbs."""

import random

import pytest

from tests.measure.recorded import Job, measured, plant, record, run_ranks
from tests.measure.steplogs import thin


def disturbing(rank, step):
    """Marks of a profiler that is open from step 11 on, and saves in step 24."""
    return ["profiler_open"] * (step == 11) + ["profiler_close", "profiler_save"] * (step == 24)


def test_what_is_done_before_saving_belongs_to_it(tmp_path):
    extra = plant(0, every=10, host=40.0, save=60.0)
    found, _ = measured(record(tmp_path, Job(world=2, steps=63, extra=extra)))
    assert found.facts.late.checkpoint.ms_per_step == pytest.approx(10.0, rel=0.05)
    assert found.facts.late.checkpoint.occurrence_ms == pytest.approx(100.0, rel=0.02)
    assert found.facts.late.host is None


def test_work_of_every_step_does_not_belong_to_it(tmp_path):
    def extra(rank, step):
        return {"host": 12.0 + 40.0 * (step % 10 == 0), "save": 60.0 * (step % 10 == 0)} if rank == 0 else {}

    found, _ = measured(record(tmp_path, Job(world=2, steps=63, extra=extra)))
    assert found.facts.late.checkpoint.ms_per_step == pytest.approx(10.0, rel=0.05)
    assert found.facts.late.host.ms_per_step == pytest.approx(12.0, rel=0.05)


def test_all_ranks_prepare_and_save(tmp_path):
    def extra(rank, step):
        return {"host": 40.0, "save": 60.0} if step % 10 == 0 else {}

    found, _ = measured(record(tmp_path, Job(world=2, steps=63, extra=extra)))
    assert found.facts.shared.checkpoint.ms_per_step == pytest.approx(10.0, rel=0.05)
    assert found.facts.shared.host.ms_per_step < 1.0


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_checkpoints_in_disturbed_steps_come_as_often(tmp_path, ranks):
    def extra(rank, step):
        return {"host": 40.0, "save": 60.0} if rank in ranks and step % 12 == 0 else {}

    job = Job(world=2, steps=51, extra=extra, marks=disturbing)
    found, _ = measured(record(tmp_path, job))
    cost = found.facts.late.checkpoint if ranks == (0,) else found.facts.shared.checkpoint
    assert cost.ms_per_step == pytest.approx(100.0 * 4 / 48, rel=0.05)
    assert cost.steps_hit == 4
    assert cost.period_steps == 12


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_steps_of_which_only_the_times_are_kept_say_nothing_of_how_often(tmp_path, ranks):
    def extra(rank, step):
        return {"host": 40.0, "save": 60.0} if rank in ranks and step % 10 == 0 else {}

    folder = record(tmp_path, Job(world=2, steps=243, extra=extra))
    thin(folder, (0, 1), lambda step: step >= 40 and step // 8 % 4 > 0)
    found, _ = measured(folder)
    cost = found.facts.late.checkpoint if ranks == (0,) else found.facts.shared.checkpoint
    assert cost.ms_per_step == pytest.approx(10.0, rel=0.15)
    assert cost.low_ms_per_step < 10.0 < cost.high_ms_per_step


def saving(draw):
    """A job that saves in every n-th step, drawn; and the same job that does not.

    The rank prepares for ``state`` ms, saves, and what is left to do takes ``last`` ms. All ranks do ``front`` and ``back`` ms of their
    own work in the same gap in any case."""
    every, who = draw.choice((2, 5, 20)), draw.choice(((0,), (0, 1)))
    front, back = draw.choice((0, 5, 10)), draw.choice((0, 5, 10))
    state, save, last = draw.choice((0, 5, 10)), draw.choice((2, 5, 15, 40)), draw.choice((0, 0, 2))
    own = draw.choice(((), ("then_meet",), ("then_meet",), ("meet", "then_meet")))
    always = draw.choice(((), (), ("meet",), ("then_meet",), ("meet", "then_meet")))

    def of(saves):
        def extra(rank, step):
            does = {"before": front, "behind": back} | dict.fromkeys(always, 1)
            if not saves or step % every:
                return does
            does |= dict.fromkeys(own, 1)
            return does | ({"host": state, "save": save, "after": last} if rank in who else {})

        return Job(world=2, steps=6 * every + 3, host=0.05, extra=extra)

    told = {
        "every": every,
        "who": who,
        "front": front,
        "back": back,
        "state": state,
        "save": save,
        "last": last,
    }
    return of(saves=True), of(saves=False), {**told, "own": own, "always": always}


def mean_ms(job):
    """Of rank 0's steps behind the warm-up."""
    steps = [line for line in run_ranks(job)[0] if "step" in line][3:]
    return (steps[-1]["t"][1] - steps[0]["t"][0]) / len(steps) / 1e6


@pytest.mark.parametrize("seed", range(40))
def test_a_checkpoint_costs_what_its_step_takes_longer(tmp_path, seed):
    """However ranks meet around it, and whatever else they do in the same gap."""
    job, without, told = saving(random.Random(seed))
    found, _ = measured(record(tmp_path, job))
    facts = found.facts
    cost = facts.late.checkpoint if told["who"] == (0,) else facts.shared.checkpoint
    true_ms = mean_ms(job) - mean_ms(without)
    assert cost.ms_per_step == pytest.approx(true_ms, rel=0.03, abs=0.06), told
    assert cost.low_ms_per_step - 0.06 <= true_ms <= cost.high_ms_per_step + 0.06, told
    python = facts.shared.host.ms_per_step if facts.shared.host else 0.0
    assert python == pytest.approx(told["front"] + told["back"], rel=0.02, abs=0.1), told


def test_where_every_step_saves_only_the_saving_is_known_to_belong_to_it(tmp_path):
    def extra(rank, step):
        return {"behind": 10.0, "then_meet": 1} | ({"host": 10.0, "save": 20.0} if rank == 0 else {})

    found, _ = measured(record(tmp_path, Job(world=2, steps=40, extra=extra)))
    assert found.facts.late.checkpoint.ms_per_step == pytest.approx(20.0, rel=0.02)
    assert found.facts.late.host.ms_per_step == pytest.approx(10.0, rel=0.05)


def test_work_before_a_barrier_of_every_step_is_told_by_its_own_side(tmp_path):
    """The usual work in front of a barrier is no checkpoint, whatever comes behind it in the steps that save."""

    def extra(rank, step):
        does = {"before": 10.0, "meet": 1, "behind": 5.0}
        return does | ({"host": 10.0, "save": 20.0} if rank == 0 and step % 5 == 0 else {})

    found, _ = measured(record(tmp_path, Job(world=2, steps=63, extra=extra)))
    assert found.facts.late.checkpoint.ms_per_step == pytest.approx(30.0 / 5, rel=0.02)
    assert found.facts.shared.host.ms_per_step == pytest.approx(15.5, rel=0.02)
