"""ddpdoctor: finds out why a PyTorch DistributedDataParallel job is slow.

The import is light on purpose: a training script may ``import ddpdoctor`` for :func:`step`, and a job must
not pay for the analysis it does not run. ``docs/api.md`` shows what the functions are for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike

    from ddpdoctor.analysis import Frames
    from ddpdoctor.diagnose.diagnosis import Diagnosis
    from ddpdoctor.report.compare import Comparison

    Place = str | PathLike[str]

__version__ = "0.1.0"

__all__ = ["analyze", "compare", "frames", "step", "to_html", "to_json"]


def step() -> None:
    """Mark the end of a training step, for loops whose optimizer is not a ``torch.optim.Optimizer``.

    Under ``ddpdoctor run`` the mark ends the step on this rank; anywhere else it does nothing.
    """
    hook = sys.modules.get("_ddpdoctor.hook.marks")
    if hook is not None:
        hook.step()


def analyze(
    *paths: Place | Sequence[Place],
    rules: Sequence[Place] = (),
    job: int | None = None,
    redact: bool = False,
    engine: str | None = None,
) -> Diagnosis:
    """Diagnose one job: its run directory (several where its hosts wrote to separate folders), profiler traces, or a report
    or ``diagnosis.json`` made earlier, which is read as it is.

    What ``ddpdoctor analyze`` does, without printing and without a ``ddpdoctor.toml``. ``rules``: folders of further rules.
    ``job``: which one, where the traces are of several. ``redact``: without names of hosts, users and outer paths. ``engine``:
    where traces are read: ``"dask"``, ``"ray"``, or processes of this machine. Raises ``ddpdoctor.errors.UnusableInput`` where
    nothing can be analysed; whatever is missing or broken besides is named in ``notes``.
    """
    from ddpdoctor.analysis import Options, analyze_or_read
    from ddpdoctor.report import redact as redacted

    options = Options(rules=[*map(str, rules)], job=job, engine=engine)
    diagnosis = analyze_or_read(_listed(paths), lambda: options)
    return redacted(diagnosis) if redact else diagnosis


def compare(before: Diagnosis | Place, after: Diagnosis | Place) -> Comparison:
    """Whether the job is faster than before, by how much, and which findings came and went; each a diagnosis, or a path to
    :func:`analyze`."""
    from ddpdoctor.diagnose.diagnosis import Diagnosis
    from ddpdoctor.report.compare import compare as compare_diagnoses

    sides = [each if isinstance(each, Diagnosis) else analyze(each) for each in (before, after)]
    return compare_diagnoses(*sides)


def frames(*paths: Place | Sequence[Place], job: int | None = None, engine: str | None = None) -> Frames:
    """What was recorded, of all ranks on one clock, as polars frames: ``steps``, ``collectives``, ``events`` and ``ranks``.

    ``docs/export.md`` has their columns. Raises ``ddpdoctor.errors.UnusableInput`` where nothing can be measured.
    """
    from ddpdoctor.analysis import Options
    from ddpdoctor.analysis import frames as frames_of

    return frames_of(_listed(paths), Options(job=job, engine=engine))


def to_html(diagnosis: Diagnosis, *, static: bool = False) -> str:
    """The report: one document that asks nobody for anything; ``static`` without its interactive charts, 0.6 MB smaller."""
    from ddpdoctor.report import render_html

    return render_html(diagnosis, static=static)


def to_json(diagnosis: Diagnosis) -> str:
    """``diagnosis.json``, of the schema ``ddpdoctor.diagnosis/1``."""
    from ddpdoctor.report import to_json as encoded

    return encoded(diagnosis).decode()


def _listed(paths: Sequence[Place | Sequence[Place]]) -> list[str]:
    """Paths, and paths in lists of them."""
    return [
        str(each)
        for given in paths
        for each in ([given] if isinstance(given, str) or not isinstance(given, Sequence) else given)
    ]
