"""The folder of the user's own code."""

from __future__ import annotations

import os.path

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.rundir.packages import LIBRARY


def project_root(diagnosis: Diagnosis) -> str | None:
    """The deepest folder that contains all source files of the user in ``diagnosis``; None if no path is absolute."""
    files = [place.file for finding in diagnosis.findings for where in finding.where for place in where.way]
    files += [word for word in diagnosis.job.command if word.endswith(".py")]
    folders = [
        name.rpartition("/")[0] or os.sep
        for name in files
        if name.startswith("/") and not LIBRARY.match(name)
    ]
    if not folders:
        return None
    common = os.path.commonpath(folders)
    return common if common != os.sep else None
