"""The HTML report: one self-contained file that makes no network requests."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import re
from collections.abc import Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.plain import plain_lines
from ddpdoctor.report import words
from ddpdoctor.report.embed import embedded_json
from ddpdoctor.report.figures.plotly_bundle import SHA256, PlotlyBundle, interactive_bundle
from ddpdoctor.report.figures.specs import interactive_data
from ddpdoctor.report.read import SCRIPT_ID
from ddpdoctor.report.view import page
from ddpdoctor.written import REPORT, write_file

_BREAKS = re.compile(
    r"(?P<tag><[^<>]*>)|(?P<long>\w{30,})|\.(?!\w{1,5}:\d)(?=[A-Za-z_])|(?<=\w)(?=[(\[](?![)\]]))"
)
"""A tag, which stays as it is, a name that may be longer than a line, a dot within a name, but not the dot of ``train.py:57``,
or the place before a bracket that holds something."""


@functools.cache
def page_environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ddpdoctor.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["part"] = words.part
    environment.filters["nonbreaking_units"] = words.nonbreaking_units
    environment.filters["split_code"] = words.split_code
    environment.filters["strip_backticks"] = words.strip_backticks
    environment.filters["breakable"] = _breakable
    return environment


def _shown(value: Any) -> Any:
    """A value as the template shows it, without control characters and marks of writing direction; jinja2 escapes the markup."""
    return plain_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _breakable(markup: Markup) -> Markup:
    """``markup`` in which lines may break after a dot and before a bracket of a name; only names of 30 letters or more also break
    after their underscores."""
    return Markup(_BREAKS.sub(_with_breaks, str(markup)))


def _with_breaks(found: re.Match[str]) -> str:
    if found["tag"]:
        return found["tag"]
    return found["long"].replace("_", "_<wbr>") if found["long"] else f"{found[0]}<wbr>"


@functools.cache
def inlined(name: str) -> tuple[Markup, str]:
    """The text of a template's file, to place inline, and its hash for the Content-Security-Policy."""
    loader = page_environment().loader
    assert loader is not None
    source = loader.get_source(page_environment(), name)[0]
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return Markup(source), f"'sha256-{digest}'"


def render_html(diagnosis: Diagnosis, *, static: bool = False) -> str:
    """The report as one HTML document, with its ``diagnosis.json`` inside.

    ``static`` omits the interactive charts, which are most of its size.
    """
    data = interactive_data(diagnosis)
    return render_page(
        "report.html.j2",
        ["report.css"],
        ["report.js"],
        None if static else interactive_bundle(data),
        page=page(diagnosis, data),
        data=Markup(embedded_json(diagnosis)),
        script_id=SCRIPT_ID,
    )


def render_page(
    template: str, styles: Sequence[str], scripts: Sequence[str], bundle: PlotlyBundle | None, **content: Any
) -> str:
    """A page whose Content-Security-Policy allows these inline styles and scripts and the chart library of ``bundle``, nothing else."""
    if bundle is not None:
        styles, scripts = [*styles, "interactive.css"], [*scripts, "interactive.js"]
    allowed = [" ".join(inlined(name)[1] for name in names) for names in (styles, scripts)]
    library = f" 'sha256-{SHA256}'" if bundle is not None else ""
    policy = (
        f"default-src 'none'; style-src {allowed[0]}; script-src {allowed[1]}{library}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        page_environment()
        .get_template(template)
        .render(
            policy=Markup(policy),
            bundle=bundle,
            **{name.replace(".", "_"): inlined(name)[0] for name in (*styles, *scripts)},
            **content,
        )
    )


def render_plain(template: str, **shown: Any) -> str:
    """The page of ``template``, without scripts, as one HTML document."""
    style, style_hash = inlined("report.css")
    policy = f"default-src 'none'; style-src {style_hash}; base-uri 'none'; form-action 'none'"
    return page_environment().get_template(template).render(style=style, policy=Markup(policy), **shown)


def write_html(diagnosis: Diagnosis, path: str | os.PathLike[str], *, static: bool = False) -> None:
    """Write the HTML report to ``path``; ``static`` as for :func:`render_html`.

    Raises DdpDoctorError where it cannot, or another file is there.
    """
    write_file(path, render_html(diagnosis, static=static), REPORT)


def notebook_html(diagnosis: Diagnosis) -> str:
    """The diagnosis as a notebook's output cell: verdict, findings, and the first fix. An HTML fragment with inline styles,
    without scripts or links; everything from the job is escaped."""
    return page_environment().get_template("notebook.html.j2").render(page=page(diagnosis))
