"""Builds all figures of a diagnosis."""

from __future__ import annotations

import base64
import functools
import gzip
import importlib.resources
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ddpdoctor.diagnose.diagnosis import BandwidthPoint, Diagnosis, Span
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.report import words
from ddpdoctor.report.charts.bandwidth import bandwidth_data, point_words
from ddpdoctor.report.charts.bars import Breakdown, WaterfallRow, breakdown, part_detail, waterfall
from ddpdoctor.report.charts.lateness import LatenessData, late_cells, late_data
from ddpdoctor.report.charts.lines import LineData, axis_maximum
from ddpdoctor.report.charts.scale import Numbers, groups, mean, thin
from ddpdoctor.report.charts.series import step_time_data, telemetry_data
from ddpdoctor.report.charts.timeline import StepData, kinds, lanes_of, merge, span_words, step_data
from ddpdoctor.report.figures.spec import (
    FULL_DETAIL,
    Detail,
    Spec,
    colour_variable,
    figure,
    kind_colour,
    light_colours,
    number_axis,
    quantity_axis,
    rounded,
    text,
    texts,
    with_colours,
)
from ddpdoctor.report.json_output import plain_value

if TYPE_CHECKING:
    import plotly.graph_objects as go


def figure_specs(diagnosis: Diagnosis) -> dict[str, Spec]:
    """The figures for which the diagnosis has numbers, by name: ``waterfall``, ``run``, ``breakdown``, ``step_times``, ``lateness``,
    ``timeline``, ``bandwidth``, and ``telemetry_<quantity>`` for each quantity, in this order."""
    found: dict[str, Spec] = {}
    rows, parts = waterfall(diagnosis), breakdown(diagnosis)
    if rows:
        found["waterfall"] = waterfall_figure(rows)
    if (run := run_figure(diagnosis)) is not None:
        found["run"] = run
    if parts is not None:
        found["breakdown"] = breakdown_figure(parts)
    found |= interactive_specs(interactive_data(diagnosis), FULL_DETAIL)
    transfers = bandwidth_data(diagnosis)
    if transfers:
        found["bandwidth"] = _bandwidth_figure(transfers)
    for field, data in telemetry_data(diagnosis).items():
        name = f"telemetry_{re.sub(r'[^a-z0-9]+', '_', field.lower())[:60]}"
        found[name if name not in found else f"{name}_{len(found)}"] = line_figure(data, FULL_DETAIL)
    return found


class InteractiveData(msgspec.Struct, frozen=True):
    """The numbers of the report's interactive charts."""

    times: LineData | None
    late: LatenessData | None
    step: StepData | None


def interactive_data(diagnosis: Diagnosis) -> InteractiveData:
    """The numbers of the interactive charts."""
    return InteractiveData(step_time_data(diagnosis), late_data(diagnosis), step_data(diagnosis))


def interactive_specs(data: InteractiveData, detail: Detail) -> dict[str, Spec]:
    """The interactive charts as figures, limited to ``detail``."""
    found: dict[str, Spec] = {}
    if data.times is not None:
        found["step_times"] = line_figure(data.times, detail)
    if data.late is not None and not data.late.all_on_time:
        found["lateness"] = late_figure(data.late, detail)
    if data.step is not None:
        found["timeline"] = step_figure(data.step, detail)
    return found


def _bandwidth_figure(transfers: dict[str, list[BandwidthPoint]]) -> Spec:
    sizes_bytes = [point.bytes for points in transfers.values() for point in points]
    low, high = math.floor(math.log2(min(sizes_bytes))), math.ceil(math.log2(max(sizes_bytes)))
    ticks = [2.0**exponent for exponent in range(low, high + 1, max(1, (high - low) // 6))]
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": text(operation),
            "x": [point.bytes for point in points],
            "y": rounded([point.bus_gb_per_s for point in points]),
            "line": {"color": colour_variable(f"l{number % 6}")},
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
        yaxis={**quantity_axis("GB/s"), "rangemode": "tozero"},
    )


SHADE_DIGITS = 3
"""Significant digits of a cell, as in the report's texts."""
_DASHES = ("solid", "7px,2px", "3px,2px", "solid", "9px,3px,2px,3px", "solid")
"""Dash patterns of the lines by number, as in the report's style sheet."""

_MARK_COLOURS = {"pause": "critical", "periodic": "critical", "change": "ink", "growth": "ink"}
_MARK_DASHES = {"pause": "solid", "periodic": "solid", "change": "6px,4px", "growth": "2px,3px"}


def line_figure(data: LineData, detail: Detail) -> Spec:
    """Line chart, with a band from minimum to maximum if there are many lines."""
    axes = data.axes
    x = [axes.x[group.start] for group in groups(len(axes.x), detail.points)]
    form, unit = (".4~s", "B") if axes.binary else (".5~g", f" {axes.unit}" if axes.unit else "")
    traces: list[dict[str, Any]] = []

    def band(values: Numbers, **more: Any) -> dict[str, Any]:
        return {"type": "scatter", "mode": "lines", "x": x, "y": rounded(values), "hoverinfo": "skip", **more}

    if data.low:
        edge = {"width": 0, "color": colour_variable("band")}
        low, high = thin(data.low, detail.points, min), thin(data.high, detail.points, max)
        traces.append(band(low, line=edge, showlegend=False, name="lowest"))
        traces.append(
            band(
                high, line=edge, fill="tonexty", fillcolor=colour_variable("band"), name=text(data.band_label)
            )
        )
    for number, (name, values) in enumerate(data.lines):
        y, colour, dash = thin(values, detail.points, mean), f"l{number % 6}", _DASHES[number % len(_DASHES)]
        mode, hover = "lines+markers" if len(x) < 3 else "lines", f"%{{y:{form}}}{text(unit)}"
        traces.append(_line(name, x, rounded(y), colour, dash, mode, hovertemplate=hover))
    top = axis_maximum(data)
    for mark in data.marks:
        lines = mark.lines(top)
        marked_x = [place for x0, _, x1, _ in lines for place in (x0, x1, None)]
        marked_y = [place for _, y0, _, y1 in lines for place in (*rounded([y0, y1]), None)]
        colour, dash = _MARK_COLOURS[mark.kind], _MARK_DASHES[mark.kind]
        traces.append(_line(mark.label, marked_x, marked_y, colour, dash, hoverinfo="skip"))
    return figure(
        traces,
        axes.title,
        hovermode="x unified",
        showlegend=True,
        xaxis=number_axis(axes.x_label),
        yaxis={**quantity_axis(axes.unit), "rangemode": "tozero", "range": [0, top]},
    )


def _line(
    name: str, x: Numbers, y: Numbers, colour: str, dash: str, mode: str = "lines", **hover: str
) -> dict[str, Any]:
    line = {"color": colour_variable(colour), "width": 1.6, "dash": dash}
    return {"type": "scatter", "mode": mode, "name": text(name), "x": x, "y": y, "line": line, **hover}


def late_figure(data: LatenessData, detail: Detail) -> Spec:
    """Heat map of lateness with one row per rank or group of ranks, in the shades of the report's map."""
    shared = late_cells(data.rows, detail.rows, detail.points)
    bounds = data.bounds
    top = 2 * bounds[-1] - (bounds[-2] if len(bounds) > 1 else 0.0)
    shades = [
        colour_variable("hground"),
        *(colour_variable(f"h{number}") for number in range(1, len(bounds) + 1)),
    ]
    edges = [0.0, *(bound / top for bound in bounds), 1.0]
    scale = [
        [edge, shade] for number, shade in enumerate(shades) for edge in (edges[number], edges[number + 1])
    ]
    x = [data.steps[group.start] for group in groups(len(data.steps), detail.points)]
    heat = {
        "type": "heatmap",
        "x": x,
        "y": [f"rank {label}" for label in shared.labels],
        "z": [rounded(row, SHADE_DIGITS) for row in shared.cells],
        "zmin": 0,
        "zmax": top,
        "colorscale": scale,
        "colorbar": {"title": {"text": "ms late"}, "tickvals": bounds, "thickness": 12},
        "hoverongaps": False,
        "hovertemplate": "%{y}, %{x}: %{z:.3~g} ms late<extra></extra>",
    }
    return figure(
        [heat],
        "Lateness by rank and step",
        height=max(260, min(900, 120 + 14 * len(shared.cells))),
        xaxis={**number_axis("step"), "showgrid": False},
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False, "automargin": True},
        meta={"rows": [list(ranks) for ranks in shared.ranks]},
    )


_MIN_GAP_SHARE = 1e-6
"""Spans of a kind are joined if the gap between them is below this share of the step."""
_ROW_HEIGHT, _MARGINS = 22, 140
_WATERFALL_COLOURS = {"measured": "l5", "saving": "critical", "bound": "critical", "goal": "healthy"}
"""Colours by kind of bar. For "bound" it is the colour of the outline."""


def step_figure(data: StepData, detail: Detail) -> Spec:
    """Timeline of a step with one row per rank and lane."""
    spans = merge(data.spans, data.length_ms, _MIN_GAP_SHARE, detail.spans)
    rows = [f"rank {rank} {lane}" for rank, lanes in lanes_of(data.ranks, spans) for lane in lanes]
    traces = []
    by_kind: dict[str, list[Span]] = {kind: [] for kind in kinds(spans)}
    for span in spans:
        by_kind[span.kind].append(span)
    for kind, spans_of_kind in by_kind.items():
        traces.append(
            _bar(
                words.part(kind),
                kind,
                {
                    "y": texts(f"rank {span.rank} {span.lane}" for span in spans_of_kind),
                    "base": rounded([span.start_ms for span in spans_of_kind]),
                    "x": rounded([span.duration_ms for span in spans_of_kind]),
                    "width": 0.86,
                },
                hovertext=texts(
                    f"{span_words(span)} {words.milliseconds(span.duration_ms)} from {words.milliseconds(span.start_ms)}"
                    for span in spans_of_kind
                ),
                hovertemplate="%{y}: %{hovertext}<extra></extra>",
                textposition="none",
            )
        )
    return figure(
        traces,
        f"Timeline of step {data.step}",
        barmode="overlay",
        height=_MARGINS + _ROW_HEIGHT * len(rows),
        xaxis={**quantity_axis("ms"), "range": [0, data.length_ms]},
        yaxis=_rows(rows) | {"fixedrange": True},
    )


def breakdown_figure(data: Breakdown) -> Spec:
    """Stacked bars of the step time, one per rank."""
    labels = [f"{label} ({detail})" if detail else label for label, detail, _ in data.bars]
    factor, unit = (100.0, "%") if data.shares else (1.0, "ms")
    traces = [
        _bar(
            words.part(part),
            part,
            {
                "y": texts(labels),
                "x": rounded([factor * max(values.get(part, 0.0), 0.0) for _, _, values in data.bars]),
            },
            hovertemplate=f"%{{y}}: %{{x:.4~g}} {unit}",
        )
        for part in data.parts
    ]
    return _stacked(traces, "Where the step time goes", labels, unit, 26 * len(labels))


def run_figure(diagnosis: Diagnosis) -> Spec | None:
    """Stacked bar of the wall time of the run by part, in seconds; None if it is unknown."""
    traces = []
    for part, value in words.run_parts(diagnosis).items():
        name = f"{words.part(part, diagnosis)}{words.in_parentheses(part_detail(diagnosis, part))}"
        traces.append(_bar(name, part, {"y": [""], "x": rounded([value])}, hovertemplate="%{x:.4~g} s"))
    return _stacked(traces, "The whole run", [""], "s", 60) if traces else None


def _bar(name: str, kind: str, places: dict[str, Any], **hover: Any) -> dict[str, Any]:
    """Trace of horizontal bars of one kind. ``places``: their rows, starts and lengths."""
    trace = {"type": "bar", "orientation": "h", "name": text(name)}
    return {**trace, **places, "marker": _marker(kind), **hover}


def _stacked(traces: list[dict[str, Any]], title: str, rows: list[str], unit: str, height: int) -> Spec:
    """Figure of stacked bars. ``height``: pixels without the margins."""
    axes = {"xaxis": quantity_axis(unit), "yaxis": _rows(rows)}
    return figure(traces, title, barmode="stack", height=_MARGINS + height, **axes)


def waterfall_figure(rows: list[WaterfallRow]) -> Spec:
    """Waterfall chart of the potential savings, starting from the measured step time."""
    # Positions on the axis must be unique, and labels may not be.
    places = list(range(len(rows)))
    bar_trace = {
        "type": "bar",
        "orientation": "h",
        "y": places,
        "base": rounded([bar.from_ms for bar in rows]),
        "x": rounded([bar.ms for bar in rows]),
        "marker": {
            "color": ["rgba(0,0,0,0)" if bar.kind == "bound" else _waterfall_colour(bar) for bar in rows],
            "line": {
                "color": [_waterfall_colour(bar) for bar in rows],
                "width": [2 * (bar.kind == "bound") for bar in rows],
            },
        },
        "text": [text(bar.value) for bar in rows],
        "hovertext": texts(f"{bar.label}: {bar.value}" for bar in rows),
        "hovertemplate": "%{hovertext}<extra></extra>",
        "showlegend": False,
    }
    whiskers = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": rounded(bar.ends_ms),
            "y": [place, place],
            "line": {"color": colour_variable("ink"), "width": 1.5},
            "marker": {"symbol": "line-ns-open", "size": 8},
            "hovertemplate": "90 % interval, end: %{x:.4~g} ms<extra></extra>",
            "showlegend": False,
        }
        for place, bar in enumerate(rows)
        if bar.ends_ms
    ]
    return figure(
        [bar_trace, *whiskers],
        "Potential savings per step",
        height=_MARGINS + 30 * len(rows),
        xaxis=quantity_axis("ms"),
        yaxis={
            "autorange": "reversed",
            "automargin": True,
            "tickvals": places,
            "ticktext": texts(bar.label for bar in rows),
        },
    )


def _waterfall_colour(bar: WaterfallRow) -> str:
    return colour_variable(_WATERFALL_COLOURS[bar.kind])


def _marker(kind: str) -> dict[str, Any]:
    if kind != "comm_wait":
        return {"color": kind_colour(kind), "line": {"width": 0}}
    ground, lines = colour_variable("comm_wait2"), colour_variable("comm_wait")
    # Hatched as in the report, to be distinguishable without colours.
    return {
        "color": ground,
        "line": {"width": 0},
        "pattern": {"shape": "/", "bgcolor": ground, "fgcolor": lines, "size": 6},
    }


def _rows(labels: list[str]) -> dict[str, Any]:
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": texts(labels),
        "autorange": "reversed",
        "automargin": True,
    }


LIBRARY = "plotly-cartesian-3.1.0.min.js.gz"
SHA256 = "xGK0ChpULhbDUz+X05+7uRr09SZ/PL8jvXDXhe/ETDg="
BUDGET_BYTES = 80_000
"""Maximum size of a report's packed figures: 0.7 MB together with the library, the style and the script."""
_DETAILS = (
    Detail(points=1000, rows=64, spans=6000),
    Detail(points=480, rows=64, spans=3000),
    Detail(points=240, rows=64, spans=2000),
    Detail(points=200, rows=48, spans=1000),
    Detail(points=120, rows=32, spans=600),
    Detail(points=60, rows=16, spans=200),
)
"""Levels of detail, from fine to coarse. The first whose figures fit :data:`BUDGET_BYTES` is used, else the last."""


class PlotlyBundle(msgspec.Struct, frozen=True):
    """Library and figures as base64-encoded gzip data, for ``script`` elements of type ``text/plain``."""

    library: str
    figures: str
    names: list[str]


def interactive_bundle(data: InteractiveData) -> PlotlyBundle | None:
    """The bundle of the report's interactive charts, in the finest detail that fits; None if there are no charts."""
    packed_figures, names = "", []
    for detail in _DETAILS:
        specs = interactive_specs(data, detail)
        packed_figures, names = _packed(specs), list(specs)
        if len(packed_figures) <= BUDGET_BYTES:
            break
    return PlotlyBundle(_library(), packed_figures, names) if names else None


def bundle_of(specs: Mapping[str, Spec]) -> PlotlyBundle:
    """The bundle of ``specs`` in full detail."""
    return PlotlyBundle(_library(), _packed(specs), list(specs))


@functools.cache
def _library() -> str:
    place = importlib.resources.files("ddpdoctor.report.figures").joinpath("library", LIBRARY)
    return base64.b64encode(place.read_bytes()).decode()


def _packed(specs: Mapping[str, Any]) -> str:
    data = msgspec.json.encode(specs, enc_hook=plain_value)
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def figures(diagnosis: Diagnosis) -> dict[str, go.Figure]:
    """All figures by name. Raises DdpDoctorError if plotly is not installed."""
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise DdpDoctorError(f"Figures need the package plotly ({error}): pip install plotly.") from error
    return {
        name: go.Figure(with_colours(spec, light_colours())) for name, spec in figure_specs(diagnosis).items()
    }
