"""Profiler traces → measurement, for tests."""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.measure.flow import measure
from ddpdoctor.measure.window import read_window
from ddpdoctor.trace import find_traces, load_traces

PUBLIC = Path(__file__).resolve().parents[2].parent / "shared" / "traces"


def windows_of(folder, *, reverse=False):
    """Windows of all traces in a folder, by rank (or the other way round)."""
    traces = load_traces(list(find_traces([str(folder)]).files), jobs=1, cache=False).traces
    return [read_window(trace) for trace in (traces[::-1] if reverse else traces)]


def measured(folder):
    """Measurement of a folder of traces."""
    return reckoned(measure([], windows_of(folder), {}))


def reckoned(measurement):
    """The same; every step that was recorded is measured or has a reason."""
    steps, aside = measurement.facts.steps, measurement.set_aside
    assert steps.measured + sum(aside.values()) == steps.seen and all(aside.values()), (steps, aside)
    return measurement


def found(facts) -> dict:
    """Costs in ``late`` or ``shared`` that were found."""
    return {
        name: getattr(facts, name) for name in facts.__struct_fields__ if getattr(facts, name) is not None
    }


def accused(measurement) -> dict[str, list[int]]:
    """Cause -> ranks, for causes that cost at least half a per cent of the step by themselves."""
    late = found(measurement.facts.late)
    return {name: cost.ranks for name, cost in late.items() if name != "total" and cost.share >= 0.005}
