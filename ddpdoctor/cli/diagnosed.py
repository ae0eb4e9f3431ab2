"""The diagnosis of what a user names, be it made already or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.cli.configured import configured
from ddpdoctor.cli.progress import shown_progress

if TYPE_CHECKING:
    from ddpdoctor.diagnose.diagnosis import Diagnosis


def diagnosis_at(*paths: str, rules: Sequence[Path] = (), **reading: Any) -> Diagnosis:
    """What a single path, a diagnosis.json or a report, holds; else what the analysis says of the ``paths``, with fields of
    :class:`ddpdoctor.analysis.Options`. Raises DdpDoctorError."""
    with shown_progress() as progress:
        from ddpdoctor.analysis import analyze_or_read

        return analyze_or_read(paths, lambda: configured(progress, rules, **reading))
