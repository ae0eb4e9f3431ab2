"""The diagnosis of what a user names, be it made already or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.cli.progress import shown_progress
from ddpdoctor.cli.project_config import configured

if TYPE_CHECKING:
    from ddpdoctor.diagnose.diagnosis import Diagnosis


@contextmanager
def diagnosing(rules: Sequence[Path] = (), **reading: Any) -> Iterator[Callable[..., Diagnosis]]:
    """What gives the diagnosis at some paths: what a single one, a diagnosis.json or a report, holds, else what the analysis says
    of them, with fields of :class:`ddpdoctor.analysis.Options`. Rules and configuration are read once, if they are needed. It
    raises DdpDoctorError."""
    with shown_progress() as progress:
        from ddpdoctor.analysis import analyze_or_read

        options = cache(partial(configured, progress, rules, **reading))
        yield lambda *paths: analyze_or_read(paths, options)


def diagnosis_at(*paths: str, rules: Sequence[Path] = (), **reading: Any) -> Diagnosis:
    """The diagnosis at ``paths``, see :func:`diagnosing`."""
    with diagnosing(rules, **reading) as at:
        return at(*paths)
