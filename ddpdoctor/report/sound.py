"""Whether a diagnosis that was read from a file can be one: what types do not say, ranges, lengths and nesting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from ddpdoctor.diagnose import tried
from ddpdoctor.diagnose.diagnosis import Diagnosis

MOST_RANKS = 10_000_000
"""No job has so many."""
_MOST_NUMBER = 1e18
"""Milliseconds, bytes or nanoseconds: none of what we measure is as much, but for moments."""
_LATEST_NS = 1 << 62
"""In the year 2116."""
_MOST_NESTED = 40
_MOMENTS = ("started_ns", "created_ns")


def fault_of(diagnosis: Diagnosis) -> str | None:
    """What in ``diagnosis`` no analysis can have found, in words with its place; None where all can be."""
    return next(_faults(diagnosis), None)


def _faults(diagnosis: Diagnosis) -> Iterator[str]:
    yield from _numbers(diagnosis, "", 0)
    job, series = diagnosis.job, diagnosis.series
    ranks = [
        *job.ranks_seen,
        *job.missing_ranks,
        *series.ranks,
        *(rank.rank for rank in diagnosis.ranks),
        *(rank for finding in diagnosis.findings for rank in finding.ranks or []),
        *(span.rank for span in (diagnosis.timeline.spans if diagnosis.timeline else [])),
    ]
    if any(not 0 <= rank < MOST_RANKS for rank in ranks):
        yield "a rank below 0 or beyond ten million"
    if not 0 <= (job.world_size or 0) <= MOST_RANKS:
        yield "job.world_size below 0 or beyond ten million"
    if min(diagnosis.steps.count, diagnosis.steps.measured, *diagnosis.steps.set_aside.values(), 0) < 0:
        yield "steps: a count below 0"
    for name, rows in (("step_ms", series.step_ms), ("late_ms", series.late_ms)):
        if any(len(row) != len(series.steps) for row in rows) or len(rows) > len(series.ranks):
            yield f"series.{name} does not have one number for each rank and step"
    if any(left > right for left, right in zip(series.steps, series.steps[1:], strict=False)):
        yield "series.steps is not in order"
    for one in diagnosis.telemetry:
        if len(one.t_s) != len(one.values):
            yield f"telemetry: {one.field} does not have one value for each time"
    for finding in diagnosis.findings:
        if min(finding.coverage.steps, finding.coverage.ranks) < 0:
            yield "findings: a coverage below 0"
    if any(not -0.01 <= share <= 1.01 for share in diagnosis.breakdown.values()):
        yield "breakdown: a share that is not between 0 and 1"
    if diagnosis.tried is not None and (fault := tried.fault_of(diagnosis.tried)) is not None:
        yield f"tried: {fault}"


def _numbers(value: Any, place: str, depth: int) -> Iterator[str]:
    """Faults of all numbers in ``value``, however nested."""
    if isinstance(value, bool | str) or value is None:
        return
    if isinstance(value, int | float):
        most = _LATEST_NS if place in _MOMENTS else _MOST_NUMBER
        if not -most <= value <= most:
            yield f"{place}: a number out of range"
    elif depth > _MOST_NESTED:
        yield f"{place}: nested too deep"
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item, place, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, str(key)[:40], depth + 1)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _numbers(getattr(value, name), name, depth + 1)
