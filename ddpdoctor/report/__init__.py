"""Reports: one file per output, all reading the same :class:`~ddpdoctor.diagnose.diagnosis.Diagnosis`.

::

    outputs            terminal, html, json_output, markdown, junit, sarif
                       timeline_export  all ranks on one clock            console_output  wraps at spaces only
    content            summary, finding_view, job_view, tables, experiment_view
                       words  numbers, ranks and parts of a step
    the HTML page      charts, figures (packages)
    several runs       compare, compare_settings, history                 runs_output  both, in any form
    read back          read  a diagnosis from a file
    ``--redact``       redaction  what is replaced                        redact_names  names and forms that identify
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.deferred import deferred

if TYPE_CHECKING:
    from .html import notebook_html, render_html, write_figures, write_html
    from .json_output import formatted, to_json, write_json
    from .junit import render_junit
    from .markdown import render_markdown
    from .read import read_diagnosis
    from .redaction import redact, without_source_text
    from .sarif import to_sarif
    from .terminal import print_terminal


__getattr__ = deferred(
    __name__,
    {
        "html": "notebook_html render_html write_figures write_html",
        "json_output": "formatted to_json write_json",
        "junit": "render_junit",
        "markdown": "render_markdown",
        "read": "read_diagnosis",
        "redaction": "redact without_source_text",
        "sarif": "to_sarif",
        "terminal": "print_terminal",
    },
)
