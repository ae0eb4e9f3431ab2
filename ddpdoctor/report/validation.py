"""Validation of a diagnosis read from a file, beyond its types: ranges, lengths and nesting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ddpdoctor.diagnose import trials
from ddpdoctor.diagnose.diagnosis import Diagnosis

MOST_RANKS = 10_000_000
"""Upper limit of rank numbers and of the world size."""
MOST_TEXT_LENGTH, MOST_TOTAL_LENGTH = 1 << 18, 1 << 25
"""Most characters of one text (twice the longest argument that Linux allows), and of all texts (three times a whole report of
thousands of ranks)."""
MOST_ENTRIES = 10_000
"""Most entries of a mapping, and of a list in ``_BOUNDED_LISTS``."""
MOST_PARTS = 100
"""Most parts of a breakdown; ddpdoctor writes nine."""
_BOUNDED_LISTS = frozenset(
    (
        *(
            "findings",
            "where",
            "callers",
            "through",
            "changed_at",
            "lines",
            "evidence",
            "fixes",
            "docs",
            "stack",
        ),
        *("notes", "checked", "skipped", "waterfall", "bandwidth", "flames"),
    )
)
"""Lists that do not grow with the job's ranks or steps."""
_MOST_NUMBER = 1e18
"""Upper limit of all numbers except timestamps, in any unit."""
_LEAST_NUMBER = 1e-100
"""Absolute values below it become 0: no measured value is as small, and dividing by it could overflow."""
_LATEST_NS = 1 << 62
"""Upper limit of timestamps, epoch ns: in the year 2116."""
_MOST_NESTED = 40
_TIMESTAMPS = ("started_ns", "created_ns")


def validated(diagnosis: Diagnosis) -> Diagnosis:
    """``diagnosis`` with absolute values below 1e-100 as 0. Raises ValueError, naming the field, for values that no analysis gives."""
    values = _Values()
    values.check(diagnosis, "", 0)
    problem = next(_problems(diagnosis), None)
    if problem is not None:
        raise ValueError(problem)
    if not values.has_negligible:
        return diagnosis
    return msgspec.convert(_with_negligible_as_zero(msgspec.to_builtins(diagnosis)), Diagnosis)


def _problems(diagnosis: Diagnosis) -> Iterator[str]:
    yield from _problems_of_ranks(diagnosis)
    yield from _problems_of_series(diagnosis)
    if min(diagnosis.steps.count, diagnosis.steps.measured, *diagnosis.steps.set_aside.values(), 0) < 0:
        yield "steps: a count below 0"
    if any(min(finding.coverage.steps, finding.coverage.ranks) < 0 for finding in diagnosis.findings):
        yield "findings: a coverage below 0"
    if any(not -0.01 <= share <= 1.01 for share in diagnosis.breakdown.values()):
        yield "breakdown: a share that is not between 0 and 1"
    if max(len(diagnosis.breakdown), *(len(rank.breakdown_ms) for rank in diagnosis.ranks), 0) > MOST_PARTS:
        yield f"a breakdown of more than {MOST_PARTS} parts"
    if diagnosis.tried is not None and (problem := trials.validation_error(diagnosis.tried)) is not None:
        yield f"tried: {problem}"


def _problems_of_ranks(diagnosis: Diagnosis) -> Iterator[str]:
    job = diagnosis.job
    ranks = [
        *job.ranks_seen,
        *job.missing_ranks,
        *diagnosis.series.ranks,
        *(rank.rank for rank in diagnosis.ranks),
        *(rank for finding in diagnosis.findings for rank in finding.ranks or []),
        *(span.rank for span in (diagnosis.timeline.spans if diagnosis.timeline else [])),
    ]
    if any(not 0 <= rank < MOST_RANKS for rank in ranks):
        yield "a rank below 0 or above 10 million"
    if not 0 <= (job.world_size or 0) <= MOST_RANKS:
        yield "job.world_size below 0 or above 10 million"


def _problems_of_series(diagnosis: Diagnosis) -> Iterator[str]:
    series = diagnosis.series
    for name, rows in (("step_ms", series.step_ms), ("late_ms", series.late_ms)):
        if any(len(row) != len(series.steps) for row in rows) or len(rows) > len(series.ranks):
            yield f"series.{name} does not have one number for each rank and step"
    if any(left > right for left, right in zip(series.steps, series.steps[1:], strict=False)):
        yield "series.steps is not in order"
    for one in diagnosis.telemetry:
        if len(one.t_s) != len(one.values):
            yield f"telemetry: {one.field[:40]} does not have one value for each time"


class _Values:
    """Checks all numbers and texts of a diagnosis, at any depth."""

    def __init__(self) -> None:
        self.has_negligible = False
        """Whether a value must become 0, see :func:`_is_negligible`."""
        self._total_length = 0

    def check(self, value: Any, place: str, depth: int) -> None:
        """Raise ValueError if ``value``, which is the field ``place``, is invalid."""
        if isinstance(value, bool) or value is None:
            return
        if isinstance(value, int | float):
            self._check_numbers([value], place)
        elif isinstance(value, str):
            self._check_text(value, place)
        elif depth > _MOST_NESTED:
            raise ValueError(f"{place}: nested too deeply")
        elif isinstance(value, list | tuple):
            self._check_list(value, place, depth)
        elif isinstance(value, dict):
            self._check_dict(value, place, depth)
        elif isinstance(value, msgspec.Struct):
            for name in value.__struct_fields__:
                self.check(getattr(value, name), name, depth + 1)

    def _check_text(self, value: str, place: str) -> None:
        self._total_length += len(value)
        if len(value) > MOST_TEXT_LENGTH:
            raise ValueError(f"{place}: a text of more than {MOST_TEXT_LENGTH:,} characters")
        if self._total_length > MOST_TOTAL_LENGTH:
            raise ValueError(f"all texts together have more than {MOST_TOTAL_LENGTH:,} characters")

    def _check_list(self, value: Sequence[Any], place: str, depth: int) -> None:
        if len(value) > MOST_ENTRIES and place in _BOUNDED_LISTS:
            raise ValueError(f"{place}: a list of more than {MOST_ENTRIES:,} entries")
        # Checked together for speed: series have a number for each rank and point.
        numbers = [item for item in value if type(item) in (float, int)]
        if numbers:
            self._check_numbers(numbers, place)
        if len(numbers) < len(value):
            for item in value:
                if type(item) not in (float, int):
                    self.check(item, place, depth + 1)

    def _check_dict(self, value: dict[Any, Any], place: str, depth: int) -> None:
        if len(value) > MOST_ENTRIES:
            raise ValueError(f"{place}: more than {MOST_ENTRIES:,} entries")
        for key, item in value.items():
            self.check(str(key), place, depth + 1)
            self.check(item, str(key)[:40], depth + 1)

    def _check_numbers(self, numbers: Sequence[float], place: str) -> None:
        most = _LATEST_NS if place in _TIMESTAMPS else _MOST_NUMBER
        if not (min(numbers) >= -most and max(numbers) <= most):
            raise ValueError(f"{place}: a number out of range")
        small = [value for value in numbers if -_LEAST_NUMBER < value < _LEAST_NUMBER]
        self.has_negligible = self.has_negligible or any(map(_is_negligible, small))


def _is_negligible(value: float) -> bool:
    """Whether ``value`` is a tiny number other than 0, or negative zero."""
    return -_LEAST_NUMBER < value < _LEAST_NUMBER and repr(value) not in ("0", "0.0")


def _with_negligible_as_zero(value: Any) -> Any:
    if isinstance(value, float):
        return 0.0 if _is_negligible(value) else value
    if isinstance(value, dict):
        return {key: _with_negligible_as_zero(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_negligible_as_zero(item) for item in value]
    return value
