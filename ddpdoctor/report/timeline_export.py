"""All ranks on one clock as a Chrome trace, for https://ui.perfetto.dev, and the same data as Parquet.

The tables are those of ``ddpdoctor.measure.export``, whose columns are described there and in
``docs/export.md``. Each rank is a process; its tracks hold the steps, computation, host work and
communication, where waiting for other ranks and transferring are slices of their own. The findings are a
process of their own above the ranks.
"""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from ddpdoctor.diagnose.diagnosis import Finding
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.measure.taxonomy import Component, Part
from ddpdoctor.report import words
from ddpdoctor.report.replace import write_whole

MOST_SLICES = 400_000
"""Slices that a browser still opens without complaint; longer runs are cut to neighbouring steps."""

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
"""What an event is called on the timeline, where its own name does not say it."""
_MOST_TRACKS = 1_000
"""Thread numbers kept for each process, so that no two processes share one."""
_LEAST_LATE_SHARE = 0.01
"""Lateness is drawn from this part of the median step on: below, it is scatter."""
_SLACK_NS = 1_000
"""Slices of one track that overlap by less are cut, not moved to a second track: rounding of the tables."""


class Slice(msgspec.Struct, frozen=True):
    """A bar on a track; times in ns."""

    start_ns: int
    end_ns: int
    name: str
    category: str
    args: dict[str, Any] = {}


def write_timeline(
    tables: Mapping[str, pl.DataFrame],
    findings: Sequence[Finding],
    hosts: Mapping[int, str],
    path: str | os.PathLike[str],
) -> None:
    """Write the Chrome trace to ``path``, compressed where its name ends in ``.gz``.

    ``tables`` holds steps, collectives and events. Raises DdpDoctorError where the file cannot be written.
    """
    data = msgspec.json.encode(chrome_trace(tables, findings, hosts))
    write_whole(path, gzip.compress(data, 6) if os.fspath(path).endswith(".gz") else data)


def write_parquet(tables: Mapping[str, pl.DataFrame], folder: str | os.PathLike[str]) -> list[Path]:
    """Write each table as ``<folder>/<name>.parquet``; the files. Raises DdpDoctorError where it cannot."""
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DdpDoctorError(f"cannot write {target}: {error.strerror or error}") from error
    files = []
    for name, table in tables.items():
        packed = io.BytesIO()
        table.write_parquet(packed)
        write_whole(target / f"{name}.parquet", packed.getvalue())
        files.append(target / f"{name}.parquet")
    return files


def cut_steps(tables: Mapping[str, pl.DataFrame], first: int, last: int) -> dict[str, pl.DataFrame]:
    """The tables from the first start of step ``first`` to the last end of step ``last``, both included."""
    steps = tables["steps"].filter(pl.col("step").is_between(first, last))
    if steps.is_empty():
        return {name: table.clear() for name, table in tables.items()}
    start, end = int(steps["start_ns"].min()), int(steps["end_ns"].max())  # type: ignore[arg-type]
    collectives, events = tables["collectives"], tables["events"]
    stop = pl.col("start_ns") + pl.col("duration_ns")
    return {
        "steps": steps,
        "collectives": collectives.filter((pl.col("arrival_ns") < end) & (pl.col("end_ns") > start)),
        "events": events.filter((pl.col("start_ns") < end) & (stop > start)),
    }


def steps_that_fit(tables: Mapping[str, pl.DataFrame], most: int = MOST_SLICES) -> tuple[int, int] | None:
    """(first, last) of neighbouring steps in the middle of the run with at most about ``most`` slices; None
    where all of them fit or no steps are known."""
    slices = sum(len(table) for table in tables.values()) + len(tables["collectives"])
    numbers = tables["steps"]["step"].unique().sort()
    if slices <= most or len(numbers) < 2:
        return None
    keep = max(1, len(numbers) * most // slices)
    begin = (len(numbers) - keep) // 2
    return int(numbers[begin]), int(numbers[begin + keep - 1])


def chrome_trace(
    tables: Mapping[str, pl.DataFrame], findings: Sequence[Finding], hosts: Mapping[int, str]
) -> dict[str, Any]:
    """The trace in the JSON Object Format of the Trace Event Format: complete events and names."""
    ranks = sorted({int(rank) for table in tables.values() for rank in table["rank"].unique()})
    origin = min((int(t[c].min()) for t, c in _starts(tables) if len(t)), default=0)  # type: ignore[arg-type]
    events: list[dict[str, Any]] = []
    late = _lateness(tables["steps"], tables["collectives"])
    for rank in ranks:
        of_rank = {name: table.filter(pl.col("rank") == rank) for name, table in tables.items()}
        host = f" on {hosts[rank]}" if hosts.get(rank) else ""
        # Process and thread 0 stand for the idle task in Perfetto's model.
        events += _process(
            rank + 1, f"rank {rank}{host}", rank + 1, _rank_tracks(of_rank, late.get(rank, [])), origin
        )
    marked = _finding_tracks(tables["steps"], findings)
    if marked:
        events += _process(max(ranks, default=0) + 2, "findings", 0, marked, origin)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"producer": "ddpdoctor", "origin_epoch_ns": str(origin)},
        "traceEvents": events,
    }


def _starts(tables: Mapping[str, pl.DataFrame]) -> list[tuple[pl.DataFrame, str]]:
    return [
        (tables["steps"], "start_ns"),
        (tables["collectives"], "arrival_ns"),
        (tables["events"], "start_ns"),
    ]


def _lateness(steps: pl.DataFrame, collectives: pl.DataFrame) -> dict[int, list[Slice]]:
    """By rank: from the median rank's arrival at a collective to its own, where that is later."""
    usual_step_ns = (steps["end_ns"] - steps["start_ns"]).median() if len(steps) else 0
    least_ns = _LEAST_LATE_SHARE * (usual_step_ns if isinstance(usual_step_ns, int | float) else 0)
    same = ("source", "kind", "operation", "group", "last_arrival_ns")
    # Against the last arrival, because the quantile is a double, which has no room for epoch nanoseconds.
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


def _rank_tracks(tables: Mapping[str, pl.DataFrame], late: Sequence[Slice]) -> list[tuple[str, list[Slice]]]:
    found: dict[str, list[Slice]] = {name: [] for name in _ORDER}
    found[_LATE] += late
    for row in tables["steps"].iter_rows(named=True):
        args = {"marks": row["marks"]} if row["marks"] else {}
        found[_STEP].append(Slice(row["start_ns"], row["end_ns"], f"step {row['step']}", "step", args))
    both = tables["events"]["source"].n_unique() > 1
    for row in tables["events"].iter_rows(named=True):
        # Beside a device's own events, the log says what the host was issuing at that time.
        track = _COMPUTE if row["track"] == "compute" else _HOST
        track = _ISSUED if both and row["source"] == "step-log" else track
        end = row["start_ns"] + row["duration_ns"]
        found[track].append(Slice(row["start_ns"], end, _LABELS.get(row["name"], row["name"]), row["name"]))
    for row in tables["collectives"].iter_rows(named=True):
        found[_COMMUNICATION] += _collective(row)
    tracks = []
    for name in _ORDER:
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
    """Slices on as few tracks as possible, so that those of one track do not overlap, in order of time."""
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


def _finding_tracks(steps: pl.DataFrame, findings: Sequence[Finding]) -> list[tuple[str, list[Slice]]]:
    """One track for each finding, over the steps in which it was seen."""
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
            "ranks": words.rank_names(finding.ranks),
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


def _process(
    pid: int, name: str, place: int, tracks: Sequence[tuple[str, list[Slice]]], origin: int
) -> list[dict[str, Any]]:
    first = pid * _MOST_TRACKS
    events = [_meta(pid, first, "process_name", name=name)]
    events.append(_meta(pid, first, "process_sort_index", sort_index=place))
    for tid, (label, slices) in enumerate(tracks, first):
        events.append(_meta(pid, tid, "thread_name", name=label))
        events.append(_meta(pid, tid, "thread_sort_index", sort_index=tid))
        events += [
            {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "ts": (item.start_ns - origin) / 1e3,
                "dur": (item.end_ns - item.start_ns) / 1e3,
                "name": item.name,
                "cat": item.category,
                "args": item.args,
            }
            for item in slices
        ]
    return events


def _meta(pid: int, tid: int, name: str, /, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": name, "args": args}
