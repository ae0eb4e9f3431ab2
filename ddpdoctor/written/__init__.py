"""What ddpdoctor writes at the user's request, and what it may replace there: only what it wrote itself, in this very form.

A page, a text or an archive ends with a line that holds a hash of all before it (its *seal*); JSON is known by how it begins; a
folder's files by the list of their hashes, ``ddpdoctor.sha256``, which ``sha256sum --check`` reads, too. Whatever else is there
stays, and the command says so. Files appear whole: written beside, then renamed.
"""

from __future__ import annotations

from ddpdoctor.written.files import check_file, is_stdout, replace_file, write_file, write_once
from ddpdoctor.written.folders import LIST, WrittenFolder
from ddpdoctor.written.forms import (
    BUNDLE,
    COMPARISON,
    COMPARISON_PAGE,
    DIAGNOSIS,
    DOCTOR,
    EVENTS,
    FORMS,
    HISTORY,
    HISTORY_PAGE,
    JUNIT,
    MARKDOWN,
    PATCH,
    REPORT,
    SARIF,
    TIMELINE,
    TRIALS,
    Form,
)
