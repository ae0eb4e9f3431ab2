"""Options of an analysis."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from ddpdoctor.diagnose.load import RuleSet
from ddpdoctor.stages import Progress, no_progress


class Options(msgspec.Struct, frozen=True):
    """Options of an analysis; the defaults are those of the Python API."""

    rules: Sequence[Path | str] = ()
    loaded_rules: RuleSet | None = None
    """Rules that the caller has loaded already; ``rules`` is then ignored."""
    thresholds: Mapping[str, Mapping[str, float]] = msgspec.field(default_factory=dict)
    suppressed: Collection[str] = ()
    suppressed_by: str = ""
    """File in which the rules are suppressed, for the note."""
    jobs: int | None = None
    cache: bool = True
    engine: str | None = None
    """Engine that reads traces, see :func:`ddpdoctor.trace.clusters.open_engine`; None: processes of this machine."""
    job: int | None = None
    """Number of the job to analyse, as the error message lists them; None: there must be only one."""
    window: int | None = None
    """Number, from 1, of a profiler window requested with ``ddpdoctor capture``; None: the run's first window."""
    attempt: int | None = None
    """Number, from 1, of the attempt of a restarted run whose steps to measure; None: the one with the most steps."""
    training: int | None = None
    """Number, from 1, of the training to measure, where the same processes take several one after the other; None: the longest one."""
    hta: bool = False
    source_text: bool = True
    """Whether findings include the text of their source lines, if the files are present and unchanged."""
    progress: Progress = no_progress
    """Called at the start of each stage and with the share of it that is done."""
