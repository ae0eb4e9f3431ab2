"""Lines over the run, and who is late when."""

from __future__ import annotations

from typing import Any

from ddpdoctor.report.charts.lateness import LateData, late_cells
from ddpdoctor.report.charts.lines import LineData, top_of
from ddpdoctor.report.charts.scale import Numbers, groups, mean, thin
from ddpdoctor.report.figures.spec import Detail, Spec, colour, counted, figure, measured, short, text

SHADE_DIGITS = 3
"""Significant digits of a cell: it shows one of six shades, and the report's words have as many."""
_DASHES = ("solid", "7px,2px", "3px,2px", "solid", "9px,3px,2px,3px", "solid")
"""Of lines by their number, as in the report's style."""


def line_figure(data: LineData, detail: Detail) -> Spec:
    """Lines, and of many the band from the lowest to the highest."""
    frame = data.frame
    x = [frame.x[group.start] for group in groups(len(frame.x), detail.points)]
    form, unit = (".4~s", "B") if frame.binary else (".5~g", f" {frame.unit}" if frame.unit else "")
    traces: list[dict[str, Any]] = []

    def band(values: Numbers, **more: Any) -> dict[str, Any]:
        return {"type": "scatter", "mode": "lines", "x": x, "y": short(values), "hoverinfo": "skip", **more}

    if data.low:
        edge = {"width": 0, "color": colour("band")}
        low, high = thin(data.low, detail.points, min), thin(data.high, detail.points, max)
        traces.append(band(low, line=edge, showlegend=False, name="lowest"))
        traces.append(
            band(high, line=edge, fill="tonexty", fillcolor=colour("band"), name=text(data.band_label))
        )
    for number, (name, values) in enumerate(data.lines):
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(x) < 3 else "lines",
                "name": text(name),
                "x": x,
                "y": short(thin(values, detail.points, mean)),
                "line": {
                    "color": colour(f"l{number % 6}"),
                    "width": 1.6,
                    "dash": _DASHES[number % len(_DASHES)],
                },
                "hovertemplate": f"%{{y:{form}}}{text(unit)}",
            }
        )
    return figure(
        traces,
        frame.title,
        hovermode="x unified",
        showlegend=True,
        xaxis=counted(frame.x_label),
        yaxis={**measured(frame.unit), "rangemode": "tozero", "range": [0, top_of(data)]},
    )


def late_figure(data: LateData, detail: Detail) -> Spec:
    """A row for each rank, in the shades of the report's map."""
    shared = late_cells(data.rows, detail.rows, detail.points)
    bounds = data.bounds
    top = 2 * bounds[-1] - (bounds[-2] if len(bounds) > 1 else 0.0)
    shades = [colour("hground"), *(colour(f"h{number}") for number in range(1, len(bounds) + 1))]
    edges = [0.0, *(bound / top for bound in bounds), 1.0]
    scale = [
        [edge, shade] for number, shade in enumerate(shades) for edge in (edges[number], edges[number + 1])
    ]
    x = [data.steps[group.start] for group in groups(len(data.steps), detail.points)]
    heat = {
        "type": "heatmap",
        "x": x,
        "y": [f"rank {label}" for label in shared.labels],
        "z": [short(row, SHADE_DIGITS) for row in shared.cells],
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
        xaxis={**counted("step"), "showgrid": False},
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False, "automargin": True},
        meta={"rows": [list(ranks) for ranks in shared.ranks]},
    )
