"""Lateness per rank and over time."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.metrics import series
from tests.measure.made import MS, simple


def test_each_step_has_its_own_lateness():
    """Of five measured cycles, the first has a number that no rank recorded: another profiler counted."""
    late = np.zeros((5, 1, 3))
    late[:, 0, 2] = [50.0, 10.0, 20.0, 30.0, 40.0]
    graph = simple(3, cycles=5, host=late)
    own = [
        replace(steps, steps=steps.steps[1:], start=np.zeros(4), end=np.full(4, MS)) for steps in graph.steps
    ]
    over_time = series(replace(graph, steps=own))
    assert over_time.steps == [1, 2, 3, 4]
    assert over_time.late_ms[2] == [10.0, 20.0, 30.0, 40.0]
