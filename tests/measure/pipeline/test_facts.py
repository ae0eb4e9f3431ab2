"""What rules read of a pipeline job: slow workers, slow stages, or nobody."""

from __future__ import annotations

import pytest

from ddpdoctor.analysis import analyze
from ddpdoctor.errors import UnusableInput
from ddpdoctor.measure.pipeline import measure_stragglers, straggler_facts
from tests.measure.pipeline.test_stragglers import PUBLISHED, Job, needs_published, passes

SHAPE = {"stages": 4, "micro_batches": 8, "replicas": 3, "steps": 5}


def facts_of(slow, times=3.0):
    return straggler_facts(measure_stragglers(Job(passes(slow=slow, times=times), **SHAPE).operations()))


def test_a_slow_worker_is_late_in_every_step():
    facts = facts_of(lambda step, *place: place == (1, 2))
    late = facts.late.compute
    assert (late.ranks, late.persistence, late.steps_hit, facts.pipeline.stage) == ([6], "always", 5, None)
    assert late.own_ms == pytest.approx(3 * late.typical_ms)
    assert late.ms_per_step == pytest.approx(facts.steps.mean_ms * (1 - 1 / late.speedup))
    assert facts.late.total.ranks == [6]


def test_a_slow_worker_now_and_then_is_hit_then_only():
    late = facts_of(lambda step, *place: place == (1, 2) and step == 12).late.compute
    assert (late.ranks, late.steps_hit, late.first_step, late.last_step) == ([6], 1, 12, 12)


def test_a_slow_stage_is_nobodys_lateness():
    facts = facts_of(lambda step, replica, stage: stage == 3, times=1.8)
    assert facts.pipeline.slow_stages == [3]
    assert facts.pipeline.stage.ranks == [3, 7, 11]
    assert (facts.late.compute, facts.late.total.ranks) == (None, None)


def test_nobody_is_late_where_all_are_alike():
    facts = facts_of(None)
    assert (facts.late.compute, facts.pipeline.stage, facts.pipeline.slow_stages) == (None, None, None)
    assert facts.late.total.ms_per_step == pytest.approx(0, abs=1e-6)


@needs_published
@pytest.mark.extended
def test_the_published_job_is_diagnosed():
    diagnosis = analyze(str(PUBLISHED))
    assert [(finding.rule, finding.ranks) for finding in diagnosis.findings] == [
        ("rank-imbalance/slow-compute", [0])
    ]
    assert diagnosis.findings[0].severity == "critical"
    assert diagnosis.job.world_size == 64
    assert "the job takes 1.97 times as long" in " ".join(diagnosis.notes)


@needs_published
@pytest.mark.extended
def test_two_tables_are_two_jobs(tmp_path):
    for name in ("trace-a.parquet", "trace-b.parquet"):
        (tmp_path / name).symlink_to(PUBLISHED / "trace-AR.parquet")
    with pytest.raises(UnusableInput, match="2 tables of operations"):
        analyze(str(tmp_path))
