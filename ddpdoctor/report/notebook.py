"""The diagnosis as a notebook's output cell: verdict, findings, and what to change first."""

from __future__ import annotations

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.report.html import page_environment
from ddpdoctor.report.view import page


def notebook_html(diagnosis: Diagnosis) -> str:
    """A fragment without scripts or addresses, styled in place; everything from the job is escaped."""
    return page_environment().get_template("notebook.html.j2").render(page=page(diagnosis))
