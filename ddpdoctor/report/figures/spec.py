"""Builds figures as ``data`` and ``layout`` in plotly's format, with colours as variables of the report's style sheet."""

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
"""``{"data": [...], "layout": {...}}``, the arguments of ``Plotly.newPlot`` and ``plotly.graph_objects.Figure``."""

_VARIABLE = re.compile(r"var\(--([\w-]+)\)")
_DIGITS = 5
"""Significant digits of drawn numbers, enough at any zoom."""


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """Maximum numbers of elements in a figure."""

    points: int
    """Points of a line, columns of a map."""
    rows: int
    """Rows of a map."""
    spans: int
    """Spans of a timeline."""


FULL_DETAIL = Detail(points=100_000, rows=100_000, spans=20_000)
"""Full detail. Browsers cannot move a timeline of more spans."""


def figure(data: list[dict[str, Any]], title: str, **layout: Any) -> Spec:
    """A figure with the layout that all figures share."""
    shared = {
        "title": {"text": text(title)},
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "margin": {"l": 60, "r": 20, "t": 90, "b": 40},
    }
    return {"data": data, "layout": {**shared, **layout}}


def number_axis(what: str) -> dict[str, Any]:
    """An axis of numbers. The first tick label has a name: "step 20", "40", "60"."""
    return {"tickprefix": f"{what} ", "showtickprefix": "first", "tickformat": ",~f", "hoverformat": ",~f"}


def quantity_axis(unit: str) -> dict[str, Any]:
    """An axis of a quantity in ``unit``: "20 ms"."""
    if unit == "bytes":
        return {"tickformat": "~s", "ticksuffix": "B"}
    return {"ticksuffix": f" {text(unit)}" if unit else ""}


def text(name: str) -> str:
    """``name`` escaped for plotly, which reads ``<b>`` and ``<a href>`` as markup."""
    return html.escape(plain(name), quote=False)


def texts(names: Iterable[str]) -> list[str]:
    return [text(name) for name in names]


def colour_variable(name: str) -> str:
    """A reference to the CSS variable of a colour, which the page resolves in light or dark mode."""
    return f"var(--{name})"


def kind_colour(kind: str) -> str:
    """The colour of a part of a step."""
    return colour_variable(kind if kind in words.PART_LABELS else "other")


def rounded(values: Sequence[float | None], digits: int = _DIGITS) -> list[float | None]:
    """``values`` with ``digits`` significant digits; None if not finite."""
    numbers = map(finite_or_none, values)
    return [None if number is None else float(f"{number:.{digits}g}") for number in numbers]


def with_colours(value: Any, colours: Mapping[str, str]) -> Any:
    """``value``, a figure or a part of one, with colour variables replaced by ``colours``."""
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: colours[found[1]], value) if "var(" in value else value
    if isinstance(value, dict):
        return {key: with_colours(item, colours) for key, item in value.items()}
    if isinstance(value, list):
        # Long lists are numbers or names, without colours.
        return value if len(value) > 50 else [with_colours(item, colours) for item in value]
    return value


@functools.cache
def light_colours() -> Mapping[str, str]:
    """The colours of the report's style sheet in light mode, by name."""
    style = importlib.resources.files("ddpdoctor.report").joinpath("templates", "report.css").read_text()
    return dict(re.findall(r"--([\w-]+):(#[0-9a-f]+)", style[: style.index("@media")]))
