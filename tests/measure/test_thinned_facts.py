"""Facts of long jobs, of most steps of which only the times are kept."""

from __future__ import annotations

import json

import pytest

from tests.measure.recorded import Job, measured, record
from tests.measure.steplogs import thin


def test_steps_without_events_do_not_change_what_a_step_contains(tmp_path):
    """Four micro-batches of 32 samples, for each of which the loop waits 2 ms."""
    job = Job(world=2, steps=120, accumulation=4)
    run = record(tmp_path / "run", job)
    thin(run, range(2), lambda step: step // 8 % 4 != 1)
    facts = measured(run)[0].facts
    assert (facts.steps.micro_batches, facts.steps.batch_size) == (4, 32)
    assert facts.loader.wait_ms == pytest.approx(8.0, rel=0.02)


def test_evaluations_by_one_rank_cost_as_much_where_half_of_the_steps_have_no_events(tmp_path):
    job = Job(world=4, steps=241, epoch=20, evaluation=400.0, evaluators=(0,))
    whole = measured(record(tmp_path / "whole", job))[0].facts.late.evaluation
    run = record(tmp_path / "thinned", job)
    thin(run, range(4), lambda step: step // 40 % 2 == 1)
    half = measured(run)[0].facts.late.evaluation
    assert half.ms_per_step == pytest.approx(whole.ms_per_step, rel=0.2)


def test_waits_for_batches_of_an_evaluation_are_none_of_the_training_loader(tmp_path):
    facts = measured(record(tmp_path / "run", Job(world=2, steps=101, epoch=20)))[0].facts
    assert facts.loader.wait_ms == pytest.approx(2.0, rel=0.02)


def test_of_several_modules_each_reduced_by_itself_only_its_own_buckets_count(tmp_path):
    """As an actor and a critic: each backward pass reduces one of two modules."""
    run = record(tmp_path / "run", Job(world=2, steps=40))
    one = measured(run)[0].facts.buckets
    for rank in range(2):
        file = run / "ranks" / f"{rank:05d}" / "rank.json"
        document = json.loads(file.read_text())
        document["ddp"] = document["ddp"] * 2
        file.write_text(json.dumps(document))
    two = measured(run)[0].facts.buckets
    assert one.per_sync and (two.per_sync, two.total_bytes) == (one.per_sync, one.total_bytes)
