"""One step: what each rank did, where the time goes, what it could be."""

from __future__ import annotations

from typing import Any

from ddpdoctor.diagnose.diagnosis import Span
from ddpdoctor.report import words
from ddpdoctor.report.charts.breakdown import BreakdownData
from ddpdoctor.report.charts.timeline import StepData, kinds, lanes_of, merge, span_words
from ddpdoctor.report.charts.waterfall import Fall
from ddpdoctor.report.figures.spec import (
    Detail,
    Spec,
    colour,
    figure,
    kind_colour,
    measured,
    short,
    text,
    texts,
)

_SEEN_APART = 1e-6
"""Spans of one kind closer together than this share of the step are drawn as one, however far one zooms."""
_ROW_HEIGHT, _MARGINS = 22, 140
_FALL_COLOURS = {"measured": "l5", "saving": "critical", "goal": "calm"}


def step_figure(data: StepData, detail: Detail) -> Spec:
    """Bars on one clock, a row for each rank and lane."""
    spans = merge(data.spans, data.length_ms, _SEEN_APART, detail.spans)
    rows = [f"rank {rank} {lane}" for rank, lanes in lanes_of(data.ranks, spans) for lane in lanes]
    traces = []
    by_kind: dict[str, list[Span]] = {kind: [] for kind in kinds(spans)}
    for span in spans:
        by_kind[span.kind].append(span)
    for kind, own in by_kind.items():
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": text(words.part(kind)),
                "y": texts(f"rank {span.rank} {span.lane}" for span in own),
                "base": short([span.start_ms for span in own]),
                "x": short([span.duration_ms for span in own]),
                "width": 0.86,
                "marker": _marker(kind),
                "hovertext": texts(
                    f"{span_words(span)} {words.milliseconds(span.duration_ms)} from {words.milliseconds(span.start_ms)}"
                    for span in own
                ),
                "hovertemplate": "%{y}: %{hovertext}<extra></extra>",
                "textposition": "none",
            }
        )
    return figure(
        traces,
        f"Timeline of step {data.step}",
        barmode="overlay",
        height=_MARGINS + _ROW_HEIGHT * len(rows),
        xaxis={**measured("ms"), "range": [0, data.length_ms]},
        yaxis=_rows(rows) | {"fixedrange": True},
    )


def breakdown_figure(data: BreakdownData) -> Spec:
    """One stacked bar for each rank."""
    labels = [f"{label} ({detail})" if detail else label for label, detail, _ in data.bars]
    factor, unit = (100.0, "%") if data.shares else (1.0, "ms")
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": text(words.part(part)),
            "y": texts(labels),
            "x": short([factor * max(values.get(part, 0.0), 0.0) for _, _, values in data.bars]),
            "marker": _marker(part),
            "hovertemplate": f"%{{y}}: %{{x:.4~g}} {unit}",
        }
        for part in data.parts
    ]
    return figure(
        traces,
        "Where a step's time goes",
        barmode="stack",
        height=_MARGINS + 26 * len(labels),
        xaxis=measured(unit),
        yaxis=_rows(labels),
    )


def waterfall_figure(falls: list[Fall]) -> Spec:
    """From the measured step time to what it could be."""
    # Labels need not differ, places on an axis must.
    places = list(range(len(falls)))
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": places,
        "base": short([fall.from_ms for fall in falls]),
        "x": short([fall.ms for fall in falls]),
        "marker": {"color": [colour(_FALL_COLOURS[fall.kind]) for fall in falls]},
        "text": [text(fall.value) for fall in falls],
        "hovertext": texts(f"{fall.label}: {fall.value}" for fall in falls),
        "hovertemplate": "%{hovertext}<extra></extra>",
        "showlegend": False,
    }
    whiskers = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": short(fall.ends_ms),
            "y": [place, place],
            "line": {"color": colour("ink"), "width": 1.5},
            "marker": {"symbol": "line-ns-open", "size": 8},
            "hovertemplate": "nine times in ten from here to there: %{x:.4~g} ms<extra></extra>",
            "showlegend": False,
        }
        for place, fall in enumerate(falls)
        if fall.ends_ms
    ]
    return figure(
        [bars, *whiskers],
        "From the measured step to what it could be",
        height=_MARGINS + 30 * len(falls),
        xaxis=measured("ms"),
        yaxis={
            "autorange": "reversed",
            "automargin": True,
            "tickvals": places,
            "ticktext": texts(fall.label for fall in falls),
        },
    )


def _marker(kind: str) -> dict[str, Any]:
    if kind != "comm_wait":
        return {"color": kind_colour(kind), "line": {"width": 0}}
    ground, lines = colour("comm_wait2"), colour("comm_wait")
    # Hatched, as in the report: the worst kind is told without its colour, too.
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
