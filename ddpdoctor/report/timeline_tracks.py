"""The tracks of a timeline, each with slices that do not overlap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import polars as pl

from ddpdoctor.diagnose.diagnosis import Finding
from ddpdoctor.measure.taxonomy import Component, Part
from ddpdoctor.report import words

_STEP, _COMPUTE, _HOST, _ISSUED, _COMMUNICATION, _LATE = (
    "step",
    "compute",
    "host and data",
    "host log",
    "communication",
    "late",
)
_ORDER = (_STEP, _HOST, _ISSUED, _COMPUTE, _COMMUNICATION, _LATE)
_LABELS: dict[str, str] = {
    Component.DATA: "waiting for data",
    Component.EPOCH_START: "start of the loader",
    Component.COPY: "copy to device",
    Component.COLLECTION: "garbage collection",
    Component.DEVICE_SYNC: "idle: host waited for device",
    Component.LAUNCH: "idle: host issues work",
}
"""Labels of events on the timeline whose own name is not clear."""
_MIN_LATE_SHARE = 0.01
"""Smaller lateness, as a share of the median step, is not drawn: it is normal scatter."""
_SLACK_NS = 1_000
"""Slices of one track that overlap by less (from rounding) are cut, not moved to a second track."""


class Slice(msgspec.Struct, frozen=True):
    """A bar on a track; times in ns."""

    start_ns: int
    end_ns: int
    name: str
    category: str
    args: dict[str, Any] = {}


def lateness(steps: pl.DataFrame, collectives: pl.DataFrame) -> dict[int, list[Slice]]:
    """By rank: slices from the median rank's arrival at a collective to its own, if that is later."""
    usual_step_ns = (steps["end_ns"] - steps["start_ns"]).median() if len(steps) else 0
    least_ns = _MIN_LATE_SHARE * (usual_step_ns if isinstance(usual_step_ns, int | float) else 0)
    same = ("source", "kind", "operation", "group", "last_arrival_ns")
    # Relative to the last arrival, because the quantile is a double, which cannot represent epoch nanoseconds.
    ahead = (pl.col("arrival_ns") - pl.col("last_arrival_ns")).quantile(0.5, "lower").over(same)
    middle = pl.col("last_arrival_ns") + ahead.cast(pl.Int64)
    known = collectives.filter(pl.col("last_arrival_ns").is_not_null())
    matched = known.with_columns(middle.alias("middle_ns"))
    found: dict[int, list[Slice]] = {}
    for row in matched.filter(pl.col("arrival_ns") - pl.col("middle_ns") > least_ns).iter_rows(named=True):
        late_ms = (row["arrival_ns"] - row["middle_ns"]) / 1e6
        name = f"late at {row['operation']}"
        item = Slice(
            row["middle_ns"], row["arrival_ns"], name, "late", {"late_ms": late_ms, "step": row["step"]}
        )
        found.setdefault(row["rank"], []).append(item)
    return found


def rank_tracks(tables: Mapping[str, pl.DataFrame], late: Sequence[Slice]) -> list[tuple[str, list[Slice]]]:
    """Tracks of one rank: measured work first, below it annotations, operators, kernels and sampled lines."""
    found: dict[str, list[Slice]] = {name: [] for name in _ORDER}
    found[_LATE] += late
    for row in tables["steps"].iter_rows(named=True):
        args = {"marks": row["marks"]} if row["marks"] else {}
        found[_STEP].append(Slice(row["start_ns"], row["end_ns"], f"step {row['step']}", "step", args))
    has_both_sources = tables["events"]["source"].n_unique() > 1
    for row in tables["events"].iter_rows(named=True):
        # If the device's own events are there too, the log shows what the host issued at that time.
        track = _COMPUTE if row["track"] == "compute" else _HOST
        track = _ISSUED if has_both_sources and row["source"] == "step-log" else track
        end = row["start_ns"] + row["duration_ns"]
        found[track].append(Slice(row["start_ns"], end, _LABELS.get(row["name"], row["name"]), row["name"]))
    for row in tables["collectives"].iter_rows(named=True):
        found[_COMMUNICATION] += _collective(row)
    for row in tables["details"].iter_rows(named=True) if "details" in tables else ():
        end = row["start_ns"] + row["duration_ns"]
        found.setdefault(row["track"], []).append(Slice(row["start_ns"], end, row["name"], "detail"))
    tracks = []
    for name in found:
        lanes = _lanes(found[name])
        tracks += [(name if n == 0 else f"{name} {n + 1}", lane) for n, lane in enumerate(lanes)]
    return tracks


def _collective(row: Mapping[str, Any]) -> list[Slice]:
    operation = row["operation"]
    args = {
        name: row[name] for name in ("kind", "group", "step", "message_bytes") if row[name] not in (None, "")
    }
    if row["wait_ns"] is None:
        return [Slice(row["arrival_ns"], row["end_ns"], f"{operation}, not matched", "communication", args)]
    together = row["arrival_ns"] + row["wait_ns"]
    return [
        Slice(row["arrival_ns"], together, f"{operation}: wait", Part.COMM_WAIT, args),
        Slice(together, row["end_ns"], f"{operation}: transfer", Part.COMM_TRANSFER, args),
    ]


def _lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Slices on as few tracks as possible, without overlap within a track, in order of time."""
    lanes: list[list[Slice]] = []
    for item in sorted(slices, key=lambda s: (s.start_ns, s.end_ns)):
        if item.end_ns <= item.start_ns:
            continue
        lane = next((lane for lane in lanes if lane[-1].end_ns <= item.start_ns + _SLACK_NS), None)
        if lane is None:
            lanes.append([item])
            continue
        start = max(item.start_ns, lane[-1].end_ns)
        if item.end_ns > start:
            lane.append(msgspec.structs.replace(item, start_ns=start))
    return lanes


def finding_tracks(
    steps: pl.DataFrame, findings: Sequence[Finding], all_ranks: str
) -> list[tuple[str, list[Slice]]]:
    """One track per finding, over the steps in which it occurs; ``all_ranks``: the name for all recorded ranks."""
    tracks = []
    for finding in findings:
        chosen = steps
        if finding.steps:
            chosen = steps.filter(pl.col("step").is_between(finding.steps[0], finding.steps[-1]))
        if chosen.is_empty():
            continue
        args = {
            "rule": finding.rule,
            "severity": finding.severity,
            "ranks": words.rank_names(finding.ranks, all_ranks),
            "costs_ms_per_step": finding.costs_ms_per_step,
            "where": [
                " ← ".join(f"{one.file}:{one.line} {one.function}" for one in where.way)
                for where in finding.where
            ],
            "explanation": " ".join(finding.explanation.split()),
            "fixes": [fix.title for fix in finding.fixes],
        }
        start, end = int(chosen["start_ns"].min()), int(chosen["end_ns"].max())  # type: ignore[arg-type]
        tracks.append((finding.rule, [Slice(start, end, finding.title, "finding", args)]))
    return tracks
