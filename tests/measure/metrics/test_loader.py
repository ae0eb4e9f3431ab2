"""What is told of the data loaders."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.diagnose.load import load_rules
from ddpdoctor.diagnose.selftest import outcome_of
from tests.measure.metrics.prefetched import COMPUTE_MS, HEALTHY, KINDS, STARVED, drawn
from tests.measure.recorded import Job, measured, record

PACK = load_rules(entry_points=False)


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


@pytest.mark.parametrize("jobs", [100, pytest.param(600, marks=pytest.mark.slow)])
def test_how_often_a_healthy_loader_is_called_slow_and_a_slow_one_is_found(jobs):
    """The rates that the threshold of ``dataloader/starved`` states, with three standard errors."""
    drawn_jobs = [drawn(kind, seed) for kind in KINDS for seed in range(jobs)]
    said = [(job, starved_of(job)) for job in drawn_jobs]
    healthy = [severity for job, severity in said if job.waits_ms <= HEALTHY * job.step_ms]
    for severities, stated in ((("info", "warning", "critical"), 0.013), (("warning", "critical"), 0.005)):
        named = np.isin(healthy, severities).mean()
        assert named <= stated + 3 * np.sqrt(stated / len(healthy)), severities
    for least, most_fetch_ms, stated in ((0.2, np.inf, 0.95), (STARVED, 0.05 * COMPUTE_MS, 0.97)):
        found = [
            severity is not None
            for job, severity in said
            if job.waits_ms >= least * job.step_ms and job.cost_ms - job.waits_ms <= most_fetch_ms
        ]
        assert np.mean(found) >= stated - 3 * np.sqrt(0.05 * 0.95 / len(found))


def starved_of(job):
    """Severity with which the rule reports a simulated job; None if it does not."""
    loader = {
        "wait_ms": job.cost_ms,
        "num_workers": 4,
        "ready_batches": job.ready,
        "workers_busy_share": min(job.busy, 1.0),
        "fetch_share": job.fetch_share,
    }
    facts = {
        "steps": {"mean_ms": job.step_ms},
        "loader": loader,
        "shared": {"data": {"ms_per_step": max(job.cost_ms, 0.0)}},
    }
    found = outcome_of(PACK.rules["dataloader/starved"], PACK.common, facts).findings
    return found[0].severity if found else None
