"""Hosts and devices over the run: one small chart per measured quantity."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.diagnose.diagnosis import Diagnosis, TelemetrySeries
from ddpdoctor.report import words
from ddpdoctor.report.charts.lines import LINES, ChartAxes, LineChart, LineData, line_chart, line_data
from ddpdoctor.report.charts.scale import Numbers, finite_or_none, finite_values, mean, quantile

CHARTS = 16
"""Most quantities drawn."""
_MOST_VALUES = 4_000_000
"""Most values of a chart, all sources together; with more sources, fewer times are drawn."""
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
"""Names that differ from their field's words."""


def telemetry(diagnosis: Diagnosis) -> list[LineChart]:
    """The charts of :func:`telemetry_data`."""
    charts = [line_chart(data) for data in telemetry_data(diagnosis).values()]
    return [chart for chart in charts if chart is not None]


def telemetry_data(diagnosis: Diagnosis) -> dict[str, LineData]:
    """The measured quantities by field, in the order of the diagnosis; those without a value, and bytes that are always 0, are omitted."""
    by_field: dict[tuple[str, str], list[TelemetrySeries]] = {}
    for series in diagnosis.telemetry:
        if len(series.t_s) >= 2 and finite_values(series.values):
            by_field.setdefault((series.field, series.unit), []).append(series)
    drawn = [entry for entry in by_field.items() if not _is_unused(*entry)]
    found: dict[str, LineData] = {}
    for (field, unit), measured in drawn[:CHARTS]:
        data = _data(field, unit, measured)
        if data is not None:
            found[f"{field} {unit}" if field in found else field] = data
    return found


def _is_unused(quantity: tuple[str, str], measured: Sequence[TelemetrySeries]) -> bool:
    """Whether these are bytes, and none: the memory of worker processes where there are none."""
    return quantity[1] == "bytes" and not any(any(finite_values(series.values)) for series in measured)


def _data(field: str, unit: str, series: Sequence[TelemetrySeries]) -> LineData | None:
    longest = max(series, key=lambda one: len(one.t_s)).t_s
    times = longest[:: max(1, len(longest) * len(series) // _MOST_VALUES)]
    clock = [finite_or_none(moment - times[0]) or 0.0 for moment in times]
    name = _name(field, unit)
    is_percent = unit in ("%", "percent")
    highest = max(max(finite_values(one.values)) for one in series)
    frame = ChartAxes(
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
    lines = [(one.source, _on_clock(one, times)) for one in series]
    return line_data(frame, lines, _by_distance(lines) if len(lines) > LINES else [])


def _name(field: str, unit: str) -> str:
    """The quantity without its unit, which the axis shows: "CPU", "Memory used"."""
    if field in _NAMES:
        return _NAMES[field]
    plain = field.removesuffix(f"_{unit}").removesuffix("_percent" if unit == "%" else "")
    return " ".join(ACRONYMS.get(word, word) for word in plain.split("_"))


def _on_clock(series: TelemetrySeries, clock: Sequence[float]) -> Numbers:
    """The latest value at each time of ``clock``, as hosts sample at different times."""
    if series.t_s == clock:
        return series.values
    values: list[float | None] = []
    index = -1
    for moment in clock:
        while index + 1 < min(len(series.t_s), len(series.values)) and series.t_s[index + 1] <= moment:
            index += 1
        values.append(series.values[index] if index >= 0 else None)
    return values


def _by_distance(lines: Sequence[tuple[str, Numbers]]) -> list[str]:
    """Names of the lines, ordered by the distance of their mean from the median of all means, largest first."""
    means = {name: mean(numbers) for name, values in lines if (numbers := finite_values(values))}
    middle = quantile(list(means.values()), 0.5)
    return sorted(means, key=lambda name: -abs(means[name] - middle))
