"""Writes the output files and folders that the user requests. Existing files are replaced only if ddpdoctor wrote them and they are
unchanged; other existing files are an error.

Pages, texts and archives end with a line that has a hash of all bytes before it (the *seal*). JSON is recognised by its beginning. A
folder has a list of its files' hashes, ``ddpdoctor.sha256``, which ``sha256sum --check`` accepts. Files are written to a temporary
file and renamed.
"""

from __future__ import annotations

from ddpdoctor.written.files import (
    BUNDLE,
    COMPARISON,
    COMPARISON_PAGE,
    DIAGNOSIS,
    DOCTOR,
    EVENTS,
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
    check_file,
    is_stdout,
    replace_file,
    write_file,
    write_once,
)
from ddpdoctor.written.folders import LIST, WrittenFolder
