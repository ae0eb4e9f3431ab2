"""Line charts over the run: step times per rank with marked events, and measurements of hosts and devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, TelemetrySeries
from ddpdoctor.diagnose.rule_texts import ordinal
from ddpdoctor.measure.runfacts import RunEvent
from ddpdoctor.report import words
from ddpdoctor.report.charts.lines import LINES, ChartAxes, LineChart, LineData, Mark, line_chart, line_data
from ddpdoctor.report.charts.scale import Numbers, finite_or_none, finite_values, mean, quantile
from ddpdoctor.report.finding_view import place

_MAX_LISTED_STEPS = 4
"""Maximum number of steps listed in a sentence."""
_MAX_MARKS = 100
"""Maximum number of periodic steps marked individually. For more steps, one line spans the first to the last."""


def step_time_data(diagnosis: Diagnosis) -> LineData | None:
    """Step times as one line per rank, or for many ranks as median, band and notable ranks; None with fewer than two points."""
    series = diagnosis.series
    length = min(len(series.steps), max((len(row) for row in series.step_ms), default=0))
    if length < 2:
        return None
    outliers = [rank_line(rank) for rank in notable_ranks(diagnosis)]
    axes = ChartAxes(
        title="Step times",
        description=f"Step time over {words.count(length, 'point')}, per rank.",
        x=series.steps[:length],
        x_label="step",
        height=180,
        show=words.milliseconds,
        unit="ms",
        group="ranks",
        are_means=True,
    )
    lines = [(rank_line(rank), row) for rank, row in zip(series.ranks, series.step_ms, strict=False)]
    return line_data(axes, lines, outliers, _marks(diagnosis))


def _marks(diagnosis: Diagnosis) -> list[Mark]:
    """Marks for single pauses, periodic steps, a change and growth of the step time that the facts ``run`` contain."""
    marks = []
    for kind in ("pause", "periodic", "change", "growth"):
        event = run_event(diagnosis, kind)
        if event is None:
            continue
        at: list[float] = sorted(event.steps)
        levels = None
        if kind == "growth":
            levels = event.before_ms or 0.0, event.after_ms or 0.0
        elif kind == "change":
            at = at[:1]
        elif len(at) > _MAX_MARKS:
            at, levels = [at[0], at[-1]], (0.0, 0.0)
        marks.append(Mark(kind=kind, label=event_words(event, kind), at=at, levels=levels))
    return marks


def event_words(event: RunEvent, kind: str) -> str:
    """Description of ``event``, a fact ``run.KIND``: "step 240: 7.99 s longer (train.py:5)"."""
    before, after = (words.milliseconds(value) for value in (event.before_ms, event.after_ms))
    if kind == "change":
        text = f"from step {event.steps[0]:,} on: {before} → {after}"
    elif kind == "growth":
        text = f"growing: {before} → {after}"
    else:
        together = " together" if len(event.steps) > 1 else ""
        text = f"{event_steps(event)}: {words.seconds(event.total_s)} longer{together}"
    return text + words.in_parentheses(event_line(event))


def run_event(diagnosis: Diagnosis, kind: str) -> RunEvent | None:
    """The fact ``run.KIND`` ("pause", "periodic", "change", "growth"); None if it is missing, invalid or has no steps."""
    run: Any = diagnosis.facts.get("run")
    try:
        event = msgspec.convert(run[kind], RunEvent)
    except (msgspec.ValidationError, TypeError, KeyError):
        return None
    return event if event.steps else None


def event_steps(event: RunEvent) -> str:
    if event.every:
        return f"every {ordinal(event.every)} step"
    *others, last = [f"{step:,}" for step in event.steps[:_MAX_LISTED_STEPS]]
    return f"steps {', '.join(others)} and {last}" if others else f"step {last}"


def event_line(event: RunEvent) -> str:
    """The source line that takes most of the event's time: "train.py:5"; empty if unknown."""
    return place(event.where[0]).short if event.where else ""


def rank_line(rank: int) -> str:
    """The name of a rank's line in a chart."""
    return f"rank {rank}"


NOTABLE_SHARE = 0.1
"""Minimum delay caused by a notable rank, as a share of the maximum over the ranks."""


def notable_ranks(diagnosis: Diagnosis) -> list[int]:
    """Ranks to show separately: first those of the findings, in order of cost, then those that delay others most."""
    order: dict[int, None] = {}
    for finding in diagnosis.findings:
        order |= dict.fromkeys((finding.ranks or [])[:8])
    waits = {rank.rank: rank.caused_wait_ms or rank.late_ms or 0.0 for rank in diagnosis.ranks}
    min_delay_ms = NOTABLE_SHARE * max(waits.values(), default=0.0)
    by_wait = sorted(waits, key=lambda rank: -waits[rank])
    order |= dict.fromkeys(rank for rank in by_wait if waits[rank] > 0 and waits[rank] >= min_delay_ms)
    if not diagnosis.ranks:
        latest = sorted(
            zip(diagnosis.series.ranks, diagnosis.series.late_ms, strict=False),
            key=lambda pair: -sum(finite_values(pair[1])),
        )
        order |= dict.fromkeys(rank for rank, row in latest if sum(finite_values(row)) > 0)
    return list(order)


CHARTS = 16
"""Maximum number of telemetry charts."""
_MAX_VALUES = 4_000_000
"""Maximum number of values in a chart over all sources. With more, only every n-th time is used."""
ACRONYMS = {
    "cpu": "CPU",
    "gpu": "GPU",
    "sm": "SM",
    "pcie": "PCIe",
    "nvlink": "NVLink",
    "ecc": "ECC",
    "io": "I/O",
    "iowait": "I/O wait",
}


_NAMES = {"children_memory_bytes": "memory of worker processes"}
"""Names of fields that are not formed from the words of the field."""


def telemetry(diagnosis: Diagnosis) -> list[LineChart]:
    """The charts of :func:`telemetry_data`."""
    charts = [line_chart(data) for data in telemetry_data(diagnosis).values()]
    return [chart for chart in charts if chart is not None]


def telemetry_data(diagnosis: Diagnosis) -> dict[str, LineData]:
    """Chart data by field, in the order of the diagnosis, without fields that have no value or are bytes that are always 0."""
    by_field: dict[tuple[str, str], list[TelemetrySeries]] = {}
    for series in diagnosis.telemetry:
        if len(series.t_s) >= 2 and finite_values(series.values):
            by_field.setdefault((series.field, series.unit), []).append(series)
    drawn = [
        (quantity, measured)
        for quantity, measured in by_field.items()
        if quantity[1] != "bytes" or any(any(finite_values(series.values)) for series in measured)
    ]
    found: dict[str, LineData] = {}
    for (field, unit), measured in drawn[:CHARTS]:
        data = _quantity_data(field, unit, measured)
        if data is not None:
            found[f"{field} {unit}" if field in found else field] = data
    return found


def _quantity_data(field: str, unit: str, series: Sequence[TelemetrySeries]) -> LineData | None:
    longest = max(series, key=lambda one: len(one.t_s)).t_s
    times = longest[:: max(1, len(longest) * len(series) // _MAX_VALUES)]
    clock = [finite_or_none(moment - times[0]) or 0.0 for moment in times]
    name = _quantity_name(field, unit)
    is_percent = unit in ("%", "percent")
    highest = max(max(finite_values(one.values)) for one in series)
    axes = ChartAxes(
        title=name[:1].upper() + name[1:],
        description=f"{name} over {words.seconds(clock[-1])}, {words.count(len(series), 'source')}.",
        x=clock,
        x_label="second",
        height=84,
        show=lambda value: words.quantity(float(value), unit),
        unit="%" if is_percent else unit,
        group="sources",
        binary=unit == "bytes",
        highest=100.0 if is_percent and highest <= 100 else 1.0 if unit == "share" and highest <= 1 else None,
    )
    lines = [(one.source, _resampled(one, times)) for one in series]
    return line_data(axes, lines, _by_distance_from_median(lines) if len(lines) > LINES else [])


def _quantity_name(field: str, unit: str) -> str:
    """The name of a quantity without its unit, which the axis shows: "CPU", "memory used"."""
    if field in _NAMES:
        return _NAMES[field]
    plain = field.removesuffix(f"_{unit}").removesuffix("_percent" if unit == "%" else "")
    return " ".join(ACRONYMS.get(word, word) for word in plain.split("_"))


def _resampled(series: TelemetrySeries, clock: Sequence[float]) -> Numbers:
    """The latest value at each time of ``clock``, because hosts sample at different times."""
    if series.t_s == clock:
        return series.values
    values: list[float | None] = []
    index = -1
    for moment in clock:
        while index + 1 < min(len(series.t_s), len(series.values)) and series.t_s[index + 1] <= moment:
            index += 1
        values.append(series.values[index] if index >= 0 else None)
    return values


def _by_distance_from_median(lines: Sequence[tuple[str, Numbers]]) -> list[str]:
    """Names of the lines, sorted by the distance of their mean from the median of all means, largest first."""
    means = {name: mean(numbers) for name, values in lines if (numbers := finite_values(values))}
    middle = quantile(list(means.values()), 0.5)
    return sorted(means, key=lambda name: -abs(means[name] - middle))
