"""Figures as files: one HTML page with all of them, and each as plotly's JSON."""

from __future__ import annotations

import html
import os
from pathlib import Path

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.report.figures.plotly_bundle import bundle_of
from ddpdoctor.report.figures.spec import light_colours, with_colours
from ddpdoctor.report.figures.specs import figure_specs
from ddpdoctor.report.html import render_page
from ddpdoctor.report.json_output import encoded
from ddpdoctor.written import WrittenFolder

PAGE = "figures.html"


def write_figures(diagnosis: Diagnosis, folder: str | os.PathLike[str]) -> list[Path]:
    """Write ``figures.html`` and a ``<name>.json`` per figure into ``folder``; returns their paths, [] if there is nothing to draw.

    Raises DdpDoctorError if a file cannot be written.
    """
    specs = figure_specs(diagnosis)
    if not specs:
        return []
    target = WrittenFolder(Path(folder), "figures")
    target.check([PAGE, *(f"{name}.json" for name in specs)])
    titles = [(name, html.unescape(spec["layout"]["title"]["text"])) for name, spec in specs.items()]
    page = render_page(
        "figures.html.j2",
        ["report.css"],
        [],
        bundle_of(specs),
        titles=titles,
        headline=diagnosis.verdict.headline,
        healthy=diagnosis.healthy,
        tool_version=diagnosis.tool_version,
    )
    drawn = ((f"{name}.json", encoded(with_colours(spec, light_colours()))) for name, spec in specs.items())
    return target.write([(PAGE, page.encode("utf-8", "backslashreplace")), *drawn])
