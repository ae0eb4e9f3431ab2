"""Evaluations by one rank alone: the others stand still, in steps that are set aside."""

from __future__ import annotations

import pytest

from ddpdoctor.analysis import Options, analyze
from tests.measure.recorded import Job, record

JOB = Job(world=4, steps=101, epoch=20, evaluation=400.0)
OPTIONS = Options(cache=False, jobs=1)


def said(folder, **changes):
    return analyze(str(record(folder / "run", JOB.changed(**changes))), OPTIONS)


@pytest.mark.parametrize("module", [True, False])
@pytest.mark.parametrize("evaluators", [(0,), (1, 2)])
def test_ranks_that_evaluate_alone_are_named_and_priced_as_if_all_shared_it(tmp_path, module, evaluators):
    """Five evaluations of 400 ms in 98 steps after the warm-up; shared by all four ranks they take E / 4 of that."""
    diagnosis = said(tmp_path, evaluates_module=module, evaluators=evaluators)
    finding = diagnosis.findings[0]
    assert (finding.rule, finding.ranks) == ("rank-imbalance/lone-evaluation", list(evaluators))
    true_ms = 5 * 400.0 / 98 * (1 - len(evaluators) / 4)
    assert finding.costs_ms_per_step == pytest.approx(true_ms, rel=0.03)
    assert diagnosis.facts["late"]["evaluation"]["period_steps"] == 20


@pytest.mark.parametrize("evaluators", [None, (0, 1, 2)])
def test_an_evaluation_by_all_or_most_ranks_is_none_of_it(tmp_path, evaluators):
    diagnosis = said(tmp_path, evaluators=evaluators)
    assert diagnosis.facts["late"]["evaluation"] is None


def test_one_evaluation_is_no_habit(tmp_path):
    diagnosis = said(tmp_path, epoch=60, evaluators=(0,))
    assert not [finding for finding in diagnosis.findings if finding.rule == "rank-imbalance/lone-evaluation"]
