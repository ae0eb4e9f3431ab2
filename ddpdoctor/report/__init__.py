"""Reports: one file per output, all reading the same :class:`~ddpdoctor.diagnose.diagnosis.Diagnosis`."""

from ddpdoctor.report.html import render_html, write_html
from ddpdoctor.report.json_output import json_schema, to_json, write_json
from ddpdoctor.report.junit import render_junit, write_junit
from ddpdoctor.report.markdown import render_markdown, write_markdown
from ddpdoctor.report.read import read_diagnosis
from ddpdoctor.report.redact import redact
from ddpdoctor.report.sarif import to_sarif, write_sarif
from ddpdoctor.report.terminal import print_terminal

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
