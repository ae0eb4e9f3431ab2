"""Reports: one file per output, all reading the same :class:`~ddpdoctor.diagnose.diagnosis.Diagnosis`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .redact import redact

if TYPE_CHECKING:
    from .html import render_html, write_html
    from .json_output import json_schema, to_json, write_json
    from .junit import render_junit, write_junit
    from .markdown import render_markdown, write_markdown
    from .read import read_diagnosis
    from .sarif import to_sarif, write_sarif
    from .terminal import print_terminal

__all__ = [
    "json_schema",
    "print_terminal",
    "read_diagnosis",
    "redact",
    "render_html",
    "render_junit",
    "render_markdown",
    "to_json",
    "to_sarif",
    "write_html",
    "write_json",
    "write_junit",
    "write_markdown",
    "write_sarif",
]

_PLACES = {
    "json_schema": "json_output",
    "print_terminal": "terminal",
    "read_diagnosis": "read",
    "render_html": "html",
    "render_junit": "junit",
    "render_markdown": "markdown",
    "to_json": "json_output",
    "to_sarif": "sarif",
    "write_html": "html",
    "write_json": "json_output",
    "write_junit": "junit",
    "write_markdown": "markdown",
    "write_sarif": "sarif",
}
"""Module of each name: imported when it is asked for, because a command needs few of them."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    return value
