"""ddpdoctor: finds out why a PyTorch DistributedDataParallel job is slow.

Importing it loads no dependencies, because a training script may ``import ddpdoctor`` for :func:`step`. The analysis is imported
when a function needs it. ``docs/api.md`` shows how to use the functions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike

    from ddpdoctor.analysis.dataframes import Frames
    from ddpdoctor.diagnose.diagnosis import Diagnosis
    from ddpdoctor.report.compare import Comparison

    Place = str | PathLike[str]

__version__ = "0.1.0"

__all__ = ["analyze", "compare", "frames", "step", "to_html", "to_json"]


def step() -> None:
    """Mark the end of a training step, for loops whose optimizer is not a ``torch.optim.Optimizer``.

    Under ``ddpdoctor run`` this ends the step on this rank; otherwise it has no effect.
    """
    hook = sys.modules.get("_ddpdoctor.hook.lifetime")
    if hook is not None:
        hook.step()


def analyze(
    *paths: Place | Sequence[Place],
    rules: Sequence[Place] = (),
    job: int | None = None,
    redact: bool = False,
    engine: str | None = None,
) -> Diagnosis:
    """Diagnose one job from its run directory (several if its hosts wrote to separate folders) or its profiler traces, or read an
    existing report or ``diagnosis.json``.

    Like ``ddpdoctor analyze``, but without output and without ``ddpdoctor.toml``. ``rules``: additional folders of rules. ``job``:
    number of the job, if the traces are from several jobs. ``redact``: replace names of hosts and users, and paths outside the
    project. ``engine``: ``"dask"`` or ``"ray"`` to read traces on a cluster; default: processes on this machine. Raises
    ``ddpdoctor.errors.UnusableInput`` if nothing can be analysed. Other missing or damaged data are listed in ``notes``.
    """
    from ddpdoctor.analysis import Options, analyze_or_read
    from ddpdoctor.report.redaction import redact as redacted

    options = Options(rules=[*map(str, rules)], job=job, engine=engine)
    diagnosis = analyze_or_read(_listed(paths), lambda: options)
    return redacted(diagnosis) if redact else diagnosis


def compare(before: Diagnosis | Place, after: Diagnosis | Place) -> Comparison:
    """Compare two diagnoses, or paths for :func:`analyze`: whether the job is faster, by how much, and which findings are resolved or
    new."""
    from ddpdoctor.diagnose.diagnosis import Diagnosis
    from ddpdoctor.report.compare import compare as compare_diagnoses

    sides = [each if isinstance(each, Diagnosis) else analyze(each) for each in (before, after)]
    return compare_diagnoses(*sides)


def frames(*paths: Place | Sequence[Place], job: int | None = None, engine: str | None = None) -> Frames:
    """The recorded data of all ranks on one clock as polars data frames: ``steps``, ``collectives``, ``events`` and ``ranks``.

    ``docs/export.md`` describes their columns. Raises ``ddpdoctor.errors.UnusableInput`` if nothing can be measured.
    """
    from ddpdoctor.analysis import Options
    from ddpdoctor.analysis.dataframes import frames as frames_of

    return frames_of(_listed(paths), Options(job=job, engine=engine))


def to_html(diagnosis: Diagnosis, *, static: bool = False) -> str:
    """The HTML report as one self-contained document. ``static``: without interactive charts, 0.6 MB smaller."""
    from ddpdoctor.report.html import render_html

    return render_html(diagnosis, static=static)


def to_json(diagnosis: Diagnosis) -> str:
    """The diagnosis as JSON, as in ``diagnosis.json`` (schema ``ddpdoctor.diagnosis/1``)."""
    from ddpdoctor.report.json_output import to_json as encoded

    return encoded(diagnosis).decode()


def _listed(paths: Sequence[Place | Sequence[Place]]) -> list[str]:
    """A flat list of paths from arguments that are paths or lists of paths."""
    return [
        str(each)
        for given in paths
        for each in ([given] if isinstance(given, str) or not isinstance(given, Sequence) else given)
    ]
