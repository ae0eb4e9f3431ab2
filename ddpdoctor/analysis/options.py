"""What the caller may choose."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from ddpdoctor.diagnose.load import RuleSet
from ddpdoctor.stages import Progress, no_progress


class Options(msgspec.Struct, frozen=True):
    """How to analyse."""

    rules: Sequence[Path | str] = ()
    loaded_rules: RuleSet | None = None
    """The rules themselves, where the caller has read them already; ``rules`` is then not read."""
    thresholds: Mapping[str, Mapping[str, float]] = msgspec.field(default_factory=dict)
    suppressed: Collection[str] = ()
    suppressed_by: str = ""
    """The file that says so, for the note."""
    jobs: int | None = None
    cache: bool = True
    engine: str | None = None
    """Where traces are read, see :func:`ddpdoctor.trace.engines.open_engine`; None: processes of this machine."""
    job: int | None = None
    """Which of several jobs, numbered as the refusal lists them; None: there must be one."""
    window: int | None = None
    """Which of the profiler windows that were asked for while the job ran, numbered from 1; None: the first of all."""
    hta: bool = False
    source_text: bool = True
    """Whether findings show the text of their lines, where the files are here and as the run had them."""
    progress: Progress = no_progress
    """Is told of each stage as it begins, and of what is done of it."""
