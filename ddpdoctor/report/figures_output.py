"""Figures as files: one page that shows all of them, and each as plotly's JSON."""

from __future__ import annotations

import html
import os
from pathlib import Path

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.report.figures.every import figure_specs
from ddpdoctor.report.figures.layer import layer_of
from ddpdoctor.report.figures.spec import light_colours, painted
from ddpdoctor.report.html import render_page
from ddpdoctor.report.json_output import encoded
from ddpdoctor.report.replace import write_whole
from ddpdoctor.rundir import open_regular

PAGE = "figures.html"
_BEGIN, _BRAND = b'{"data":[', '<p class="brand">ddpdoctor<span> · figures<'.encode()
"""What our files hold: each figure at its begin, the page in its head."""
_HEAD_BYTES = 1 << 16


def write_figures(diagnosis: Diagnosis, folder: str | os.PathLike[str]) -> list[Path]:
    """Write ``figures.html`` and ``<name>.json`` into ``folder``; the files, none where the diagnosis has nothing to draw.

    Raises DdpDoctorError where one cannot be written.
    """
    specs = figure_specs(diagnosis)
    if not specs:
        return []
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DdpDoctorError(f"cannot write {target}: {error.strerror or error}") from error
    files = [target / PAGE, *(target / f"{name}.json" for name in specs)]
    for file in files:
        if file.exists() and not _is_figure(file):
            raise DdpDoctorError(f"{file} is there and none of our figures: name another folder.")
    titles = [(name, html.unescape(spec["layout"]["title"]["text"])) for name, spec in specs.items()]
    page = render_page(
        "figures.html.j2",
        ["report.css"],
        [],
        layer_of(specs),
        titles=titles,
        headline=diagnosis.verdict.headline,
        healthy=diagnosis.healthy,
        tool_version=diagnosis.tool_version,
    )
    write_whole(files[0], page)
    for file, spec in zip(files[1:], specs.values(), strict=True):
        write_whole(file, encoded(painted(spec, light_colours())))
    return files


def _is_figure(file: Path) -> bool:
    """Whether an earlier call wrote ``file``: nothing else has our names by chance and is replaced."""
    try:
        with os.fdopen(open_regular(str(file), follow=True), "rb") as source:
            head = source.read(_HEAD_BYTES)
    except OSError:
        return False
    return head.startswith(_BEGIN) if file.suffix == ".json" else _BRAND in head
