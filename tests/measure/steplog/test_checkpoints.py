"""What checkpoints cost, all that belongs to them: preparations, and those in steps that the profiler disturbs."""

import pytest

from tests.measure.recorded import Job, measured, plant, record


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
