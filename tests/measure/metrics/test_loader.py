"""What is told of the data loaders."""

from __future__ import annotations

import pytest

from tests.measure.recorded import Job, measured, record


def test_batches_that_stand_ready_while_a_rank_waits_for_another_are_none_of_its_own(tmp_path):
    job = Job(world=2, steps=60, worker=lambda rank: 4.0 if rank == 0 else 40.0)
    found, _ = measured(record(tmp_path / "one", job))
    assert found.facts.loader.ready_batches < 0.2
    found, _ = measured(record(tmp_path / "none", job.changed(worker=lambda rank: 4.0)))
    loader, step_ms = found.facts.loader, found.facts.steps.mean_ms
    assert loader.ready_batches > 1.0
    assert loader.ready_ms == pytest.approx(loader.ready_batches * step_ms, rel=0.1)


def test_what_a_ready_batch_takes_is_known_beside_slow_ones(tmp_path):
    """Every second batch is slow, and the next one is ready meanwhile, so that the queue is never empty."""
    job = Job(world=2, steps=60, data=0.5, extra=lambda rank, step: {"data": 20.0} if step % 2 else {})
    found, _ = measured(record(tmp_path / "slow", job))
    assert found.facts.loader.fetch_share == pytest.approx(0.5 / 10.5, rel=0.1)
    found, _ = measured(record(tmp_path / "even", job.changed(data=10.0, extra=lambda rank, step: {})))
    assert found.facts.loader.fetch_share == pytest.approx(1.0)
