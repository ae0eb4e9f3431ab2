"""The diagnosis at paths of the command line: read from a file, or made by the analysis."""

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
def diagnosing(rules: Sequence[Path] = (), **fields: Any) -> Iterator[Callable[..., Diagnosis]]:
    """A function that returns the diagnosis at some paths: that of a single diagnosis.json or report, else of an analysis.

    Keywords are fields of :class:`ddpdoctor.analysis.Options`. Rules and configuration are read once, if needed. The function raises
    DdpDoctorError.
    """
    with shown_progress() as progress:
        from ddpdoctor.analysis import analyze_or_read

        options = cache(partial(configured, progress, rules, **fields))
        yield lambda *paths: analyze_or_read(paths, options)


def diagnosis_at(*paths: str, rules: Sequence[Path] = (), **fields: Any) -> Diagnosis:
    """The diagnosis at ``paths``, see :func:`diagnosing`."""
    with diagnosing(rules, **fields) as at:
        return at(*paths)
