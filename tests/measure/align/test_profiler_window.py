"""Which window of a recording a trace is of, where there are several."""

from types import SimpleNamespace

import numpy as np
import pytest

from ddpdoctor.measure.align import steps_of_profiler_window
from ddpdoctor.measure.steplog import OPENED, PROFILED, Step

STEP_NS = 1_000_000
WINDOWS = {5: range(5, 8), 40: range(40, 44), 44: range(44, 46)}
"""By the first step of each; the last two follow on each other."""


def steps(moved_ns=0):
    """A log of 60 steps with three windows, moved since it was recorded."""
    profiled = {n for window in WINDOWS.values() for n in window}
    marks = {n: (OPENED, PROFILED) if n in WINDOWS else (PROFILED,) for n in profiled}
    starts = [n * STEP_NS + moved_ns for n in range(60)]
    return [
        Step(n, starts[n], starts[n] + STEP_NS, (), marks.get(n, ()), None, None, moved_ns) for n in range(60)
    ]


def trace_of(first, steps, stray=()):
    times = np.linspace(first * STEP_NS, (first + steps) * STEP_NS, 50).astype(np.int64)
    times = np.concatenate([times, np.array(stray, np.int64)])
    return SimpleNamespace(size=len(times), start_ns=times)


@pytest.mark.parametrize("moved_ns", [0, 7_000_000_000])
@pytest.mark.parametrize("first", WINDOWS)
def test_it_is_the_one_in_which_its_events_lie(first, moved_ns):
    trace = trace_of(first, len(WINDOWS[first]), stray=[0])
    found = steps_of_profiler_window(trace, steps(moved_ns))
    assert [step.number for step in found] == list(WINDOWS[first])


def test_of_one_window_it_is_that_and_of_an_empty_trace_none():
    alone = [step for step in steps() if step.number < 20]
    assert [step.number for step in steps_of_profiler_window(trace_of(500, 2), alone)] == [5, 6, 7]
    assert steps_of_profiler_window(trace_of(5, 3), [step for step in alone if not step.marks]) == []
    assert steps_of_profiler_window(SimpleNamespace(size=0, start_ns=np.array([], np.int64)), alone) == []
