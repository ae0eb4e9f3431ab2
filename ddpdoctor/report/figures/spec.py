"""What a figure is: ``data`` and ``layout`` in plotly's words, with colours by the names that the report's style gives them."""

from __future__ import annotations

import functools
import html
import importlib.resources
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ddpdoctor.plain import plain
from ddpdoctor.report import words
from ddpdoctor.report.charts.scale import finite_or_none

Spec = dict[str, Any]
"""``{"data": [...], "layout": {...}}``: what ``Plotly.newPlot`` and ``plotly.graph_objects.Figure`` take."""

_VARIABLE = re.compile(r"var\(--([\w-]+)\)")
_SHORT_DIGITS = 5
"""Significant digits of what is drawn: more than a screen shows, however far one zooms into a run."""


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the numbers a figure holds at most."""

    points: int
    """Along the time of a line or a map."""
    rows: int
    """Of a map."""
    spans: int
    """Of a timeline."""


WHOLE = Detail(points=100_000, rows=100_000, spans=20_000)
"""All that a diagnosis has; of a timeline as many spans as a browser still moves."""


def figure(data: list[dict[str, Any]], title: str, **layout: Any) -> Spec:
    """A figure with what all of them share."""
    shared = {
        "title": {"text": text(title)},
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "margin": {"l": 60, "r": 20, "t": 90, "b": 40},
    }
    return {"data": data, "layout": {**shared, **layout}}


def counted(what: str) -> dict[str, Any]:
    """An axis of numbers of something: "step 20", 40, 60."""
    return {"tickprefix": f"{what} ", "showtickprefix": "first", "tickformat": ",~f", "hoverformat": ",~f"}


def measured(unit: str) -> dict[str, Any]:
    """An axis of a quantity in ``unit``: "20 ms"."""
    if unit == "bytes":
        return {"tickformat": "~s", "ticksuffix": "B"}
    return {"ticksuffix": f" {text(unit)}" if unit else ""}


def text(name: str) -> str:
    """A text from the job as plotly shows it to the letter: what reads ``<b>`` or ``<a href>`` there would become markup."""
    return html.escape(plain(name), quote=False)


def texts(names: Iterable[str]) -> list[str]:
    return [text(name) for name in names]


def colour_variable(name: str) -> str:
    """The colour of this name, painted in later: a page has one for light and one for dark."""
    return f"var(--{name})"


def kind_colour(kind: str) -> str:
    """The colour of a part of a step."""
    return colour_variable(kind if kind in words.PART_LABELS else "other")


def short(values: Sequence[float | None], digits: int = _SHORT_DIGITS) -> list[float | None]:
    """Numbers as a figure holds them, those that are none as gaps."""
    numbers = map(finite_or_none, values)
    return [None if number is None else float(f"{number:.{digits}g}") for number in numbers]


def with_colours(value: Any, colours: Mapping[str, str]) -> Any:
    """``value``, a figure or a part of one, with each colour's name replaced by the colour."""
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: colours[found[1]], value) if "var(" in value else value
    if isinstance(value, dict):
        return {key: with_colours(item, colours) for key, item in value.items()}
    if isinstance(value, list):
        # Long lists are of numbers or of names, and hold no colour.
        return value if len(value) > 50 else [with_colours(item, colours) for item in value]
    return value


@functools.cache
def light_colours() -> Mapping[str, str]:
    """The colours of the report's style on a light ground, by name."""
    style = importlib.resources.files("ddpdoctor.report").joinpath("templates", "report.css").read_text()
    return dict(re.findall(r"--([\w-]+):(#[0-9a-f]+)", style[: style.index("@media")]))
