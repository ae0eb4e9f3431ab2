"""The gaps between the phases of a training step."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.measure.phases import NO_GAPS, gap_component, gap_description, gaps_between
from ddpdoctor.measure.taxonomy import Component

DATA, FORWARD, BACKWARD = Component.DATA, Component.FORWARD, Component.BACKWARD
OPTIMIZER, LOSS, OUTSIDE = Component.OPTIMIZER, Component.LOSS, Component.OUTSIDE


def spans(*pairs):
    table = np.array(pairs, float).reshape(-1, 2)
    return table[:, 0], table[:, 1]


PHASES = {
    DATA: spans((0, 2), (30, 32)),
    FORWARD: spans((3, 8), (33, 38)),
    BACKWARD: spans((10, 20), (40, 50)),
    OPTIMIZER: spans((20, 22), (51, 52)),
}


def test_each_gap_has_the_phases_around_it():
    gaps = gaps_between(PHASES)
    found = [(start, end, gaps.kinds[kind]) for start, end, kind in zip(*gaps.times, gaps.kind, strict=True)]
    assert found == [
        (2, 3, (DATA, FORWARD)),
        (8, 10, (FORWARD, BACKWARD)),
        (22, 30, (OPTIMIZER, DATA)),
        (32, 33, (DATA, FORWARD)),
        (38, 40, (FORWARD, BACKWARD)),
        (50, 51, (BACKWARD, OPTIMIZER)),
    ]


def test_a_phase_inside_another_makes_no_gap():
    """The optimizer steps inside the forward, as in Lightning's closures: what comes behind belongs to the outer one."""
    gaps = gaps_between({**PHASES, FORWARD: spans((3, 8), (33, 60)), DATA: spans((0, 2), (30, 32), (70, 71))})
    assert (60, 70) in set(zip(*gaps.times, strict=True))
    assert gaps.kinds[gaps.kind_at(np.array([65]))[0]] == (FORWARD, DATA)


def test_moments():
    gaps = gaps_between(PHASES)
    kinds = gaps.kind_at(np.array([-1, 1, 2.5, 25, 50.5, 60]))
    assert [gaps.kinds[kind] if kind >= 0 else None for kind in kinds] == [
        None,
        None,
        (DATA, FORWARD),
        (OPTIMIZER, DATA),
        (BACKWARD, OPTIMIZER),
        None,
    ]


@pytest.mark.parametrize("missing", (FORWARD, BACKWARD, OPTIMIZER))
def test_phases_that_nothing_marks_leave_no_gaps(missing):
    assert gaps_between({phase: times for phase, times in PHASES.items() if phase is not missing}) is NO_GAPS


@pytest.mark.parametrize(
    ("gap", "component"),
    [
        ((FORWARD, BACKWARD), LOSS),
        ((BACKWARD, OPTIMIZER), LOSS),
        ((OPTIMIZER, BACKWARD), LOSS),
        ((OPTIMIZER, DATA), OUTSIDE),
        ((DATA, FORWARD), OUTSIDE),
        ((BACKWARD, FORWARD), OUTSIDE),
    ],
)
def test_what_a_step_needs_to_get_on_is_no_work_outside_of_it(gap, component):
    assert gap_component(gap) is component


def test_words():
    assert gap_description((OPTIMIZER, DATA)) == "between optimizer.step() and the next batch"
