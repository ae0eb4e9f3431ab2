"""All figures of a diagnosis."""

from __future__ import annotations

import math
import re

import msgspec

from ddpdoctor.diagnose.diagnosis import BandwidthPoint, Diagnosis
from ddpdoctor.report import words
from ddpdoctor.report.charts.bandwidth import bandwidth_data, point_words
from ddpdoctor.report.charts.breakdown import breakdown_data
from ddpdoctor.report.charts.lateness import LateData, late_data
from ddpdoctor.report.charts.lines import LineData
from ddpdoctor.report.charts.step_times import step_time_data
from ddpdoctor.report.charts.telemetry import telemetry_data
from ddpdoctor.report.charts.timeline import StepData, step_data
from ddpdoctor.report.charts.waterfall import waterfall_data
from ddpdoctor.report.figures.one_step import breakdown_figure, step_figure, waterfall_figure
from ddpdoctor.report.figures.over_time import late_figure, line_figure
from ddpdoctor.report.figures.spec import WHOLE, Detail, Spec, colour, figure, measured, short, text, texts


def figure_specs(diagnosis: Diagnosis) -> dict[str, Spec]:
    """By name each figure that the diagnosis has numbers for: ``waterfall``, ``breakdown``, ``step_times``, ``lateness``,
    ``timeline``, ``bandwidth`` and ``telemetry_`` with each quantity's name, in this order."""
    found: dict[str, Spec] = {}
    falls, parts = waterfall_data(diagnosis), breakdown_data(diagnosis)
    if falls:
        found["waterfall"] = waterfall_figure(falls)
    if parts is not None:
        found["breakdown"] = breakdown_figure(parts)
    found |= closer_specs(closer_data(diagnosis), WHOLE)
    transfers = bandwidth_data(diagnosis)
    if transfers:
        found["bandwidth"] = _bandwidth_figure(transfers)
    for field, data in telemetry_data(diagnosis).items():
        name = f"telemetry_{re.sub(r'[^a-z0-9]+', '_', field.lower())[:60]}"
        found[name if name not in found else f"{name}_{len(found)}"] = line_figure(data, WHOLE)
    return found


class CloserData(msgspec.Struct, frozen=True):
    """The numbers of the figures at which one wants to look closer."""

    times: LineData | None
    late: LateData | None
    step: StepData | None


def closer_data(diagnosis: Diagnosis) -> CloserData:
    """They are gathered once, however often they are then drawn."""
    return CloserData(step_time_data(diagnosis), late_data(diagnosis), step_data(diagnosis))


def closer_specs(data: CloserData, detail: Detail) -> dict[str, Spec]:
    """Their figures, with so much of the numbers."""
    found: dict[str, Spec] = {}
    if data.times is not None:
        found["step_times"] = line_figure(data.times, detail)
    if data.late is not None and not data.late.calm:
        found["lateness"] = late_figure(data.late, detail)
    if data.step is not None:
        found["timeline"] = step_figure(data.step, detail)
    return found


def _bandwidth_figure(transfers: dict[str, list[BandwidthPoint]]) -> Spec:
    everything = [point.bytes for points in transfers.values() for point in points]
    low, high = math.floor(math.log2(min(everything))), math.ceil(math.log2(max(everything)))
    ticks = [2.0**exponent for exponent in range(low, high + 1, max(1, (high - low) // 6))]
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": text(operation),
            "x": [point.bytes for point in points],
            "y": short([point.bus_gb_per_s for point in points]),
            "line": {"color": colour(f"l{number % 6}")},
            "hovertext": texts(point_words(operation, point) for point in points),
            "hovertemplate": "%{hovertext}<extra></extra>",
        }
        for number, (operation, points) in enumerate(transfers.items())
    ]
    return figure(
        traces,
        "Bus bandwidth by message size",
        showlegend=True,
        xaxis={"type": "log", "tickvals": ticks, "ticktext": [words.size(tick) for tick in ticks]},
        yaxis={**measured("GB/s"), "rangemode": "tozero"},
    )
