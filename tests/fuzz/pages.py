"""What is wrong with the charts of a written page: numbers with which no browser draws them."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Iterator
from typing import Any

_NUMBERS = re.compile(r'\s(x|y|x1|x2|y1|y2|cx|cy|width|height|d|viewBox)="([^"]*)"')
_ODD = re.compile(r"nan|inf|none|e[+-]?\d", re.IGNORECASE)
_FIGURES = re.compile(r'<script type="text/plain" id="ddpdoctor-figures">([^<]*)</script>')
_LEAST, _MOST = 1e-250, 1e250
"""Between which a width in pixels can be divided by a number."""


def fault_of_page(page: str) -> str | None:
    """A sentence on the first chart that would not open; None where all do."""
    for name, value in _NUMBERS.findall(page):
        if _ODD.search(value):
            return f"a drawing with {name}={value[:60]!r}"
    packed = _FIGURES.search(page)
    if packed is None:
        return None
    figures = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return next(
        (f"figure {name}: {fault}" for name, spec in figures.items() for fault in faults_of_figure(spec)),
        None,
    )


def faults_of_figure(value: Any, key: str = "") -> Iterator[str]:
    """What of a figure, or of a part of one that is named ``key``, plotly cannot draw."""
    if isinstance(value, float | int):
        if not math.isfinite(value) or (value != 0 and not _LEAST < abs(value) < _MOST):
            yield f"{key} holds {value!r}"
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from faults_of_figure(inner, name)
    elif isinstance(value, list):
        if key == "range" and not value[0] < value[1]:
            yield f"range {value}"
        if key == "colorscale":
            if not _rises([edge for edge, _ in value]):
                yield f"colorscale {value}"
            return
        for inner in value:
            yield from faults_of_figure(inner, key)


def _rises(edges: list[float]) -> bool:
    return edges[0] == 0 and edges[-1] == 1 and edges == sorted(edges)
