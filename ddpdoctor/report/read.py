"""Reads a diagnosis from ``diagnosis.json`` or an HTML report. Checks types, ranges, lengths and nesting."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.diagnose import trials
from ddpdoctor.diagnose.diagnosis import DIAGNOSIS_SCHEMA, Diagnosis
from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import open_regular, read_bounded

SCRIPT_ID = "ddpdoctor-diagnosis"
GENERATOR = "ddpdoctor"
_REPORT = re.compile(rb'<meta\s[^<>]{0,200}?\bname="generator"\s{1,9}content="%b \S' % GENERATOR.encode())
"""Matches the head of a report. Other pages of ddpdoctor contain no diagnosis and have no version there."""
# Regular expressions suffice, because "<" is escaped in all texts of a report. An HTML parser could take quadratic time for a
# malicious page.
_BEGIN = re.compile(rb'<script\s[^<>]{0,200}?\bid="%b"[^<>]{0,200}>' % SCRIPT_ID.encode())
_END = b"</script"
_DIAGNOSIS = DIAGNOSIS_SCHEMA.rpartition("/")[0].encode()
_HEAD_BYTES = 4096
MAX_BYTES = 256 << 20
"""Maximum size of a file. The report of a job with thousands of ranks has about 10 MiB."""


class _Head(msgspec.Struct):
    """The part of a diagnosis that all versions have."""

    schema: str


def holds_diagnosis(path: Path) -> bool:
    """Whether the beginning of ``path`` looks like a file for :func:`read_diagnosis`; False if it cannot be read."""
    head = _head_of(path)
    return bool(_REPORT.search(head)) if path.suffix == ".html" else _DIAGNOSIS in head


def is_foreign_page(path: Path) -> bool:
    """Whether ``path`` is a web page of another program: its first 4 KiB do not name ddpdoctor as generator."""
    head = _head_of(path)
    return (
        len(head) == _HEAD_BYTES
        and head.lstrip().startswith(b"<")
        and b'content="%b' % GENERATOR.encode() not in head
    )


def _head_of(path: Path) -> bytes:
    """The first 4 KiB of ``path``; b"" if it cannot be read."""
    try:
        with os.fdopen(open_regular(os.fspath(path), follow=True), "rb") as source:
            return source.read(_HEAD_BYTES)
    except (OSError, ValueError):
        return b""


def read_diagnosis(path: str | os.PathLike[str]) -> Diagnosis:
    """The diagnosis in ``path``.

    Raises UnusableInput, with one sentence, if ``path`` is not a report that this version can read.
    """
    name = os.fspath(path)
    try:
        data = read_bounded(name, MAX_BYTES, follow=True)
    except OSError as error:
        raise UnusableInput(f"{name}: cannot be read: {error.strerror or error}") from error
    start = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start:
        raise UnusableInput(f"{name}: the file is empty; write the report again")
    if not start.startswith(b"<"):
        return _decode(data, name)
    return _decode(_extract_json(data, name), name)


def _extract_json(data: bytes, name: str) -> bytes:
    """The JSON in the HTML page ``data``, the content of ``name``. Raises UnusableInput if there is none."""
    begin = _BEGIN.search(data)
    end = -1 if begin is None else data.find(_END, begin.end())
    if begin is not None and end >= 0:
        return data[begin.end() : end].strip()
    if begin is not None or _REPORT.search(data):
        raise UnusableInput(f"{name}: the report is truncated; write or copy it again")
    raise UnusableInput(f"{name}: an HTML page, but not a ddpdoctor report (it contains no diagnosis)")


def _decode(data: bytes, name: str) -> Diagnosis:
    try:
        head = msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"), type=_Head)
    except msgspec.ValidationError as error:
        raise UnusableInput(f"{name}: JSON, but not a ddpdoctor diagnosis (it has no schema)") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if "truncated" in str(error):
            raise UnusableInput(f"{name}: the file is truncated; write or copy it again") from error
        raise UnusableInput(f"{name}: neither a ddpdoctor report nor a diagnosis.json ({error})") from error
    if head.schema != DIAGNOSIS_SCHEMA:
        raise UnusableInput(_schema_error(head.schema, name))
    try:
        diagnosis = msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"), type=Diagnosis)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnusableInput(f"{name}: the diagnosis does not follow {DIAGNOSIS_SCHEMA}: {error}") from error
    try:
        return validated(diagnosis)
    except ValueError as error:
        raise UnusableInput(f"{name}: the diagnosis does not follow {DIAGNOSIS_SCHEMA}: {error}") from error


def _schema_error(schema: str, name: str) -> str:
    own, _, version = DIAGNOSIS_SCHEMA.rpartition("/")
    match = re.fullmatch(rf"{re.escape(own)}/(\d+)", schema)
    if match and int(match[1]) > int(version):
        return (
            f"{name}: written by a newer ddpdoctor (schema {schema}, this one reads {DIAGNOSIS_SCHEMA}); "
            "upgrade ddpdoctor"
        )
    return (
        f"{name}: schema {schema[:80]!r} is not {DIAGNOSIS_SCHEMA}; "
        "expected a ddpdoctor report or its diagnosis.json"
    )


MAX_RANKS = 10_000_000
"""Maximum rank number and world size."""
MAX_TEXT_LENGTH, MAX_TOTAL_LENGTH = 1 << 18, 1 << 25
"""Maximum number of characters of a text (twice the longest argument that Linux allows), and of all texts (three times a report of
thousands of ranks)."""
MAX_ENTRIES = 10_000
"""Maximum number of entries of a mapping, and of a list in ``_BOUNDED_LISTS``."""
MAX_PARTS = 100
"""Maximum number of parts of a breakdown; ddpdoctor writes nine."""
_BOUNDED_LISTS = {
    *("findings", "where", "callers", "through", "changed_at", "lines", "evidence", "fixes", "docs", "stack"),
    *("notes", "checked", "skipped", "waterfall", "bandwidth", "flames"),
}
"""Lists whose length does not depend on the number of ranks or steps."""
_MAX_NUMBER = 1e18
"""Maximum absolute value of all numbers except timestamps, in any unit."""
_MIN_NUMBER = 1e-100
"""Smaller absolute values become 0. No measured value is that small, and dividing by it could overflow."""
_LATEST_NS = 1 << 62
"""Maximum timestamp, epoch ns: the year 2116."""
_MAX_DEPTH = 40
_TIMESTAMPS = ("started_ns", "created_ns")


def validated(diagnosis: Diagnosis) -> Diagnosis:
    """``diagnosis`` with absolute values below 1e-100 as 0. Raises ValueError, naming the field, for values that cannot be valid."""
    checker = _ValueChecker()
    checker.check(diagnosis, "", 0)
    problem = next(_problems(diagnosis), None)
    if problem is not None:
        raise ValueError(problem)
    if not checker.has_negligible:
        return diagnosis
    return msgspec.convert(_with_negligible_as_zero(msgspec.to_builtins(diagnosis)), Diagnosis)


def _problems(diagnosis: Diagnosis) -> Iterator[str]:
    yield from _rank_problems(diagnosis)
    yield from _series_problems(diagnosis)
    if min(diagnosis.steps.count, diagnosis.steps.measured, *diagnosis.steps.set_aside.values(), 0) < 0:
        yield "steps: a count below 0"
    if any(min(finding.coverage.steps, finding.coverage.ranks) < 0 for finding in diagnosis.findings):
        yield "findings: a coverage below 0"
    if any(not -0.01 <= share <= 1.01 for share in diagnosis.breakdown.values()):
        yield "breakdown: a share that is not between 0 and 1"
    if max(len(diagnosis.breakdown), *(len(rank.breakdown_ms) for rank in diagnosis.ranks), 0) > MAX_PARTS:
        yield f"a breakdown of more than {MAX_PARTS} parts"
    if diagnosis.tried is not None and (problem := trials.validation_error(diagnosis.tried)) is not None:
        yield f"tried: {problem}"


def _rank_problems(diagnosis: Diagnosis) -> Iterator[str]:
    job = diagnosis.job
    ranks = [
        *job.ranks_seen,
        *job.missing_ranks,
        *diagnosis.series.ranks,
        *(rank.rank for rank in diagnosis.ranks),
        *(rank for finding in diagnosis.findings for rank in finding.ranks or []),
        *(span.rank for span in (diagnosis.timeline.spans if diagnosis.timeline else [])),
    ]
    if any(not 0 <= rank < MAX_RANKS for rank in ranks):
        yield "a rank below 0 or above 10 million"
    if not 0 <= (job.world_size or 0) <= MAX_RANKS:
        yield "job.world_size below 0 or above 10 million"


def _series_problems(diagnosis: Diagnosis) -> Iterator[str]:
    series = diagnosis.series
    for name, rows in (("step_ms", series.step_ms), ("late_ms", series.late_ms)):
        if any(len(row) != len(series.steps) for row in rows) or len(rows) > len(series.ranks):
            yield f"series.{name} does not have one number for each rank and step"
    if any(left > right for left, right in zip(series.steps, series.steps[1:], strict=False)):
        yield "series.steps is not in order"
    for one in diagnosis.telemetry:
        if len(one.t_s) != len(one.values):
            yield f"telemetry: {one.field[:40]} does not have one value for each time"


class _ValueChecker:
    """Checks all numbers and texts of a diagnosis, at any depth."""

    def __init__(self) -> None:
        self.has_negligible = False
        """Whether a value must become 0, see :func:`_is_negligible`."""
        self._total_length = 0

    def check(self, value: Any, place: str, depth: int) -> None:
        """Raise ValueError if ``value``, the value of the field ``place``, is invalid."""
        if isinstance(value, bool) or value is None:
            return
        if isinstance(value, int | float):
            self._check_numbers([value], place)
        elif isinstance(value, str):
            self._check_text(value, place)
        elif depth > _MAX_DEPTH:
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
        if len(value) > MAX_TEXT_LENGTH:
            raise ValueError(f"{place}: a text of more than {MAX_TEXT_LENGTH:,} characters")
        if self._total_length > MAX_TOTAL_LENGTH:
            raise ValueError(f"all texts together have more than {MAX_TOTAL_LENGTH:,} characters")

    def _check_list(self, value: Sequence[Any], place: str, depth: int) -> None:
        if len(value) > MAX_ENTRIES and place in _BOUNDED_LISTS:
            raise ValueError(f"{place}: a list of more than {MAX_ENTRIES:,} entries")
        # All numbers are checked together for speed, because series have one per rank and point.
        numbers = [item for item in value if type(item) in (float, int)]
        if numbers:
            self._check_numbers(numbers, place)
        if len(numbers) < len(value):
            for item in value:
                if type(item) not in (float, int):
                    self.check(item, place, depth + 1)

    def _check_dict(self, value: dict[Any, Any], place: str, depth: int) -> None:
        if len(value) > MAX_ENTRIES:
            raise ValueError(f"{place}: more than {MAX_ENTRIES:,} entries")
        for key, item in value.items():
            self.check(str(key), place, depth + 1)
            self.check(item, str(key)[:40], depth + 1)

    def _check_numbers(self, numbers: Sequence[float], place: str) -> None:
        limit = _LATEST_NS if place in _TIMESTAMPS else _MAX_NUMBER
        if not (min(numbers) >= -limit and max(numbers) <= limit):
            raise ValueError(f"{place}: a number out of range")
        small = [value for value in numbers if -_MIN_NUMBER < value < _MIN_NUMBER]
        self.has_negligible = self.has_negligible or any(map(_is_negligible, small))


def _is_negligible(value: float) -> bool:
    """Whether ``value`` is a tiny number other than 0, or negative zero."""
    return -_MIN_NUMBER < value < _MIN_NUMBER and repr(value) not in ("0", "0.0")


def _with_negligible_as_zero(value: Any) -> Any:
    if isinstance(value, float):
        return 0.0 if _is_negligible(value) else value
    if isinstance(value, dict):
        return {key: _with_negligible_as_zero(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_negligible_as_zero(item) for item in value]
    return value
