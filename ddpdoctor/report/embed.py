"""The copy of ``diagnosis.json`` in an HTML report: complete if it is small, else thinned to at most 600 KB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, Series
from ddpdoctor.report.charts.scale import groups
from ddpdoctor.report.charts.step_times import notable_ranks
from ddpdoctor.report.json_output import to_json

Point = TypeVar("Point")

BUDGET_BYTES = 600_000
"""Most bytes of the embedded copy; charts, style and text stay below the rest of the report's 1.5 MB."""
RANKS, POINTS, SPANS, SOURCES, FRAMES = 16, 120, 1500, 64, 60
"""Most ranks and points of the series, spans of the timeline, sources of telemetry and frames of a flame graph in a thinned copy."""

NOTE = (
    "The data inside this HTML report is thinned to keep the file small; "
    "diagnosis.json (`--json`) has all of it."
)


def embedded_json(diagnosis: Diagnosis) -> str:
    """The diagnosis as JSON for a ``<script>`` element: ``<``, ``>`` and ``&`` are escaped."""
    data = b""
    numbers = _number_count(diagnosis)
    for form, bytes_per_number in ((_whole, 8), (_rounded, 5), (_thinned, 0), (_bare, 0)):
        # Skip forms that are certainly too large: encoding them takes seconds.
        if numbers * bytes_per_number > BUDGET_BYTES:
            continue
        data = to_json(form(diagnosis))
        if len(data) <= BUDGET_BYTES:
            break
    text = data.decode()
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _number_count(diagnosis: Diagnosis) -> int:
    """How many numbers the series and the telemetry have."""
    series = diagnosis.series
    drawn = sum(len(row) for row in (*series.step_ms, *series.late_ms))
    return drawn + sum(2 * len(one.values) for one in diagnosis.telemetry)


def _whole(diagnosis: Diagnosis) -> Diagnosis:
    return diagnosis


def _rounded(diagnosis: Diagnosis) -> Diagnosis:
    """Series and telemetry with four significant digits; no chart shows more."""
    series = diagnosis.series
    rounded = msgspec.structs.replace(
        series,
        step_ms=[_short(row) for row in series.step_ms],
        late_ms=[_short(row) for row in series.late_ms],
    )
    telemetry = [
        msgspec.structs.replace(one, t_s=_short(one.t_s), values=_short(one.values))
        for one in diagnosis.telemetry
    ]
    return msgspec.structs.replace(diagnosis, series=rounded, telemetry=telemetry)


def _thinned(diagnosis: Diagnosis) -> Diagnosis:
    """The notable ranks, every n-th point and the first spans, with a note that data are missing."""
    chosen = set(notable_ranks(diagnosis)[:RANKS])
    source = diagnosis.timeline
    if source is not None and len(source.spans) > SPANS:
        spans = [span for span in source.spans if not chosen or span.rank in chosen][:SPANS]
        source = msgspec.structs.replace(source, spans=spans)
    flames = [
        msgspec.structs.replace(one, frames=sorted(one.frames, key=lambda frame: -frame.ms)[:FRAMES])
        for one in diagnosis.flames
    ]
    telemetry = [
        msgspec.structs.replace(one, t_s=_every(one.t_s), values=_every(one.values))
        for one in diagnosis.telemetry[:SOURCES]
    ]
    return _rounded(
        msgspec.structs.replace(
            diagnosis,
            series=_thin_series(diagnosis.series, chosen),
            timeline=source,
            flames=flames,
            telemetry=telemetry,
            notes=[*diagnosis.notes, NOTE],
        )
    )


def _bare(diagnosis: Diagnosis) -> Diagnosis:
    """Verdict, findings and summaries only."""
    return msgspec.structs.replace(
        diagnosis,
        series=Series(),
        timeline=None,
        flames=[],
        telemetry=[],
        facts={},
        hta=None,
        notes=[*diagnosis.notes, NOTE],
    )


def _thin_series(series: Series, chosen: set[int]) -> Series:
    chosen_ranks = [rank for rank in series.ranks if rank in chosen] or series.ranks
    kept = [series.ranks.index(rank) for rank in chosen_ranks[:RANKS]]
    return Series(
        steps=_every(series.steps),
        ranks=[series.ranks[index] for index in kept],
        step_ms=[_every(series.step_ms[index]) for index in kept if index < len(series.step_ms)],
        late_ms=[_every(series.late_ms[index]) for index in kept if index < len(series.late_ms)],
    )


def _short(row: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.4g}") for value in row]


def _every(values: Sequence[Point]) -> list[Point]:
    return [values[group.start] for group in groups(len(values), POINTS)]
