"""Selects the data of a diagnosis for trackers (curves by step, metrics, parameters, texts, files) and limits its size."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath

import msgspec
import numpy as np

from ddpdoctor.diagnose.diagnosis import SEVERITIES, Diagnosis, JsonValue
from ddpdoctor.report import words
from ddpdoctor.report.charts.series import notable_ranks
from ddpdoctor.report.html import render_html
from ddpdoctor.report.json_output import formatted
from ddpdoctor.report.markdown import finding_markdown, render_markdown


@dataclass(frozen=True)
class Tuning:
    """Limits of an export, chosen so that the pages of trackers can show it."""

    max_ranks: int = 16
    """Ranks with their own curves, the most relevant ones, in addition to the median and maximum over all ranks."""
    max_points: int = 400
    """Points per curve, as in a report."""
    max_params: int = 200
    max_characters: int = 500
    """Characters per parameter, the limit of older MLflow servers."""
    max_findings: int = 50
    max_name_characters: int = 100
    """Characters of the name of a run, which becomes a folder, and of a metric. MLflow's limit is 250."""


_TUNING = Tuning()
MEDIAN, MAXIMUM = "median", "max"


@dataclass(frozen=True)
class Curve:
    """A series of numbers by step."""

    name: str
    """Quantity with unit, such as ``step_ms``."""
    source: str
    """``rank_00003``, or ``median`` or ``max`` over all ranks."""
    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class TrackerRun:
    """The data of one run for a tracker."""

    name: str
    """Consists of letters, digits, dots, dashes and underscores."""
    recording: str
    """Hexadecimal id, which distinguishes recordings of the same name."""
    started_s: float | None
    """Epoch seconds."""
    params: dict[str, str]
    metrics: dict[str, float]
    """Metrics of the whole run."""
    curves: list[Curve]
    tags: dict[str, str]
    verdict: str
    """Markdown with a summary of all findings."""
    findings: dict[str, str]
    """Markdown of each finding, by number and rule."""
    files: dict[str, bytes]
    note: str = ""
    """Note on ranks without curves; "" if all have them."""


def tracker_run(diagnosis: Diagnosis) -> TrackerRun:
    """The data of ``diagnosis`` for a tracker."""
    ranks = _ranks_with_curves(diagnosis)
    omitted = len(diagnosis.series.ranks) - len(ranks)
    note = ""
    if omitted:
        note = (
            f"curves of {len(ranks)} ranks, and the median and maximum of all {words.count(len(diagnosis.series.ranks), 'rank')}: "
            "those that the findings name, those that keep others waiting, and the first."
        )
    findings = diagnosis.findings[: _TUNING.max_findings]
    job = diagnosis.job
    return TrackerRun(
        name=_run_name(diagnosis),
        recording=_recording_id(diagnosis),
        started_s=None if job.started_ns is None else job.started_ns / 1e9,
        params=dict(islice(_params(diagnosis), _TUNING.max_params)),
        metrics=_metrics(diagnosis),
        curves=[*_series(diagnosis, ranks), *_breakdowns(diagnosis, ranks)],
        tags={
            "ddpdoctor.healthy": str(diagnosis.healthy).lower(),
            "ddpdoctor.verdict": diagnosis.verdict.headline,
            "ddpdoctor.rule": diagnosis.verdict.rule or "",
            "ddpdoctor.version": diagnosis.tool_version,
        },
        verdict=render_markdown(diagnosis),
        findings={
            f"{n:02} {_safe_name(finding.rule)}": finding_markdown(finding)
            for n, finding in enumerate(findings, 1)
        },
        files={
            "report.html": render_html(diagnosis).encode("utf-8", "backslashreplace"),
            "diagnosis.json": formatted(diagnosis),
        },
        note=note,
    )


def _run_name(diagnosis: Diagnosis) -> str:
    """Name of the run, from the first analysed path."""
    path = PurePath(diagnosis.source[0] if diagnosis.source else "")
    last = path.stem if path.suffix in (".json", ".html") else path.name
    short = re.sub(r"[^A-Za-z0-9._-]+", "_", last)[: _TUNING.max_name_characters]
    return short.strip("._") or "ddpdoctor"


def _recording_id(diagnosis: Diagnosis) -> str:
    """Id of the recording: a hash of the job's start time; for traces, which have none, of their paths, number of steps and median."""
    started_ns, steps = diagnosis.job.started_ns, diagnosis.steps
    identity = (diagnosis.source, steps.count, steps.median_ms) if started_ns is None else started_ns
    return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:8]


def _safe_name(name: str) -> str:
    """``name`` in a form that all trackers accept: ASCII, without the path component ``..``."""
    parts = re.sub(r"[^A-Za-z0-9_./ -]", "_", name[: _TUNING.max_name_characters]).split("/")
    return "/".join(part for part in parts if part.strip(". ")) or "unnamed"


def _ranks_with_curves(diagnosis: Diagnosis) -> list[int]:
    ranks = diagnosis.series.ranks
    if len(ranks) <= _TUNING.max_ranks:
        return list(ranks)
    with_series = set(ranks)
    notable = [rank for rank in notable_ranks(diagnosis) if rank in with_series]
    return sorted(list(dict.fromkeys([*notable, *ranks]))[: _TUNING.max_ranks])


def _series(diagnosis: Diagnosis, ranks: Sequence[int]) -> Iterator[Curve]:
    series = diagnosis.series
    stride = max(1, -(-len(series.steps) // _TUNING.max_points))
    steps = series.steps[::stride]
    if not steps or not series.ranks:
        return
    for name, rows in (("step_ms", series.step_ms), ("late_ms", series.late_ms)):
        table = np.full((len(series.ranks), len(steps)), np.nan)
        for r, row in enumerate(rows[: len(series.ranks)]):
            values = np.array(row[: len(series.steps) : stride], dtype=float)  # None becomes NaN
            table[r, : len(values)] = values
        known = ~np.isnan(table).all(axis=0)
        if not known.any():
            continue
        if len(series.ranks) > 1:
            yield _curve(name, MEDIAN, steps, known, np.nanmedian(table[:, known], axis=0))
            yield _curve(name, MAXIMUM, steps, known, np.nanmax(table[:, known], axis=0))
        for r, rank in enumerate(series.ranks):
            if rank in ranks:
                recorded = ~np.isnan(table[r])
                yield _curve(name, _rank_source(rank), steps, recorded, table[r, recorded])


def _curve(name: str, source: str, steps: list[int], known: np.ndarray, values: np.ndarray) -> Curve:
    return Curve(
        name, source, [step for step, is_there in zip(steps, known, strict=True) if is_there], values.tolist()
    )


def _breakdowns(diagnosis: Diagnosis, ranks: Sequence[int]) -> Iterator[Curve]:
    """Yields the breakdown of each rank's mean step as curves with one point at the last step, which trackers show as bars."""
    last = [diagnosis.series.steps[-1] if diagnosis.series.steps else 0]
    for rank in diagnosis.ranks:
        if rank.rank in ranks:
            for part, ms in rank.breakdown_ms.items():
                yield Curve(f"breakdown_ms/{_safe_name(part)}", _rank_source(rank.rank), last, [ms])


def _rank_source(rank: int) -> str:
    return f"rank_{rank:05d}"


def _metrics(diagnosis: Diagnosis) -> dict[str, float]:
    steps = diagnosis.steps
    found = {
        "step/median_ms": steps.median_ms,
        "step/mean_ms": steps.mean_ms,
        "step/p95_ms": steps.p95_ms,
        "step/measured": float(steps.measured),
        "samples_per_s": steps.samples_per_s,
        "healthy": float(diagnosis.healthy),
        "run/wall_s": words.number_fact(diagnosis, "run.wall_s"),
        "run/goodput": words.number_fact(diagnosis, "run.goodput"),
        "run/restarts": words.number_fact(diagnosis, "run.restarts.count"),
        **{f"run/{_safe_name(part)}_s": seconds for part, seconds in words.run_parts(diagnosis).items()},
        **{f"share/{_safe_name(part)}": share for part, share in diagnosis.breakdown.items()},
        **{
            f"findings/{severity}": float(sum(each.severity == severity for each in diagnosis.findings))
            for severity in SEVERITIES
        },
    }
    # Reversed, because a rule's costliest finding is first and must be assigned last.
    for finding in reversed(diagnosis.findings[: _TUNING.max_findings]):
        found[f"cost_ms/{_safe_name(finding.rule)}"] = finding.costs_ms_per_step
    return {name: float(value) for name, value in found.items() if value is not None and np.isfinite(value)}


def _params(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    job = diagnosis.job
    rows = [
        ("world_size", "" if job.world_size is None else str(job.world_size)),
        ("hosts", str(len(job.hosts))),
        ("backend", job.backend or ""),
        ("device", job.device or ""),
        *((f"version/{name}", version) for name, version in job.versions.items()),
        *_leaves(job.settings, ""),
    ]
    for name, text in rows:
        if text:
            yield _safe_name(name), text[: _TUNING.max_characters]


def _leaves(value: JsonValue, path: str) -> Iterator[tuple[str, str]]:
    """Yields (path, text) of the leaves of nested values, without None. The entries of a list of several mappings are numbered."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{path}/{name}" if path else str(name))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for n, item in enumerate(value, 1):
            yield from _leaves(item, f"{path} {n}" if len(value) > 1 else path)
    elif isinstance(value, list):
        yield path, ", ".join(map(str, value))
    elif value is not None:
        yield path, str(value)
