"""In which step a collective was, as its members tell it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from msgspec.structs import replace

from ddpdoctor.measure.align import align_and_match
from ddpdoctor.measure.graph import matched_collectives
from tests.measure.align.jobs import Job, recorded


def steps_told_and_true(job, ahead):
    """Of each matched collective; the profiler of rank r counts ``ahead[r]`` steps more than it should."""
    ranks = [
        dataclasses.replace(
            of, window=replace(of.window, steps=[(n + ahead[r], *span) for n, *span in of.window.steps])
        )
        for r, of in enumerate(recorded(job))
    ]
    windows, matched = align_and_match([of.window for of in ranks])
    told = matched_collectives(windows, matched.rows).step
    true = np.full(len(told), -1)
    for r, of in enumerate(ranks):
        has = matched.rows[:, r] >= 0
        true[has] = of.true[matched.rows[has, r]] // len(job.kinds)
    return told, true


@pytest.mark.parametrize("ahead", [(0, 0, 0, 0), (0, 0, 1, 0), (0, -3, 0, 0), (5, 0, 0, 0)])
def test_a_profiler_that_counts_otherwise_is_outvoted(ahead):
    """Also where events were lost, and it is one of two that have the collective."""
    told, true = steps_told_and_true(Job(ranks=4, steps=30, lost=0.2, spread=0.1), ahead)
    assert len(told) > 100
    assert set((told - true).tolist()) == {3}
