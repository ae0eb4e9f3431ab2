"""Reports: one file per output, all reading the same :class:`~ddpdoctor.diagnose.diagnosis.Diagnosis`.

::

    outputs            terminal, html, json_output, markdown, junit, sarif, figures_output
                       timeline_export  all ranks on one clock            timeline_tracks  its tracks
    content            view, summary, finding_view, job_view, memory_view, hang_view, attempts_view, experiment_view
                       words  numbers, ranks and parts of a step          console_output  wraps at spaces only
                       project  which code is the user's
    the HTML page      charts, figures (packages)                         embed  the diagnosis inside it
    several runs       compare, compare_settings, compare_output          history, history_output
    read back          read  a diagnosis from a file                      validation  whether its values are possible
    ``--redact``       redaction  what is replaced                        redact_names  names and forms that identify
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.deferred import deferred

if TYPE_CHECKING:
    from .figures_output import write_figures
    from .html import notebook_html, render_html, write_html
    from .json_output import to_json, write_json
    from .junit import render_junit, write_junit
    from .markdown import render_markdown, write_markdown
    from .read import holds_diagnosis, read_diagnosis
    from .redaction import redact, without_source_text
    from .sarif import to_sarif, write_sarif
    from .terminal import print_terminal


__getattr__ = deferred(
    __name__,
    {
        "figures_output": "write_figures",
        "html": "notebook_html render_html write_html",
        "json_output": "to_json write_json",
        "junit": "render_junit write_junit",
        "markdown": "render_markdown write_markdown",
        "read": "holds_diagnosis read_diagnosis",
        "redaction": "redact without_source_text",
        "sarif": "to_sarif write_sarif",
        "terminal": "print_terminal",
    },
)
