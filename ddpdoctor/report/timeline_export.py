"""Exports all ranks on one clock as a Chrome trace, for https://ui.perfetto.dev, and the same data as Parquet and CSV.

The tables are those of ``ddpdoctor.measure.export``; ``docs/export.md`` describes their columns. In the trace each rank is a process
with tracks for steps, host work, computation and communication (waiting and transfer), then operators, kernels and sampled lines.
The findings are a process above the ranks; hosts and GPUs are one below.
"""

from __future__ import annotations

import io
import os
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from ddpdoctor.diagnose.diagnosis import Finding
from ddpdoctor.measure.taxonomy import Component, Part
from ddpdoctor.report import words
from ddpdoctor.report.json_output import to_json
from ddpdoctor.written import TIMELINE, WrittenFolder, write_file

MAX_SLICES = 400_000
"""Maximum number of slices of measured work that browsers can open. Longer runs are cut to consecutive steps."""

_MAX_TRACKS = 1_000
"""Thread ids reserved per process, so that no two processes share a thread id."""
_DRAWING_SHARE = 0.5
"""Share of the progress of a compressed timeline that is reported before compression starts."""
_CHUNK_BYTES = 4 << 20
"""Bytes compressed between two progress reports, about 50 ms."""

OnProgress = Callable[[float], None]
"""Called with the share of an output that is done, 0 to 1."""


def _no_progress(_: float) -> None:
    pass


def write_timeline(
    tables: Mapping[str, pl.DataFrame],
    findings: Sequence[Finding],
    hosts: Mapping[int, str],
    path: str | os.PathLike[str],
    on_progress: OnProgress = _no_progress,
    *,
    all_ranks: str = "all ranks",
) -> None:
    """Write the Chrome trace to ``path``, compressed if its name ends in ``.gz``.

    ``tables`` has steps, collectives and events; ``hosts`` maps ranks to host names; ``all_ranks`` is the name for all recorded
    ranks. Raises DdpDoctorError if the file cannot be written.
    """
    compressed = os.fspath(path).endswith(".gz")
    drawing_share = _DRAWING_SHARE if compressed else 1.0
    data = to_json(
        chrome_trace(
            tables, findings, hosts, lambda part: on_progress(drawing_share * part), all_ranks=all_ranks
        )
    )
    if compressed:
        data = _compressed(data, lambda part: on_progress(drawing_share + (1 - drawing_share) * part))
    write_file(path, data, TIMELINE)


def _compressed(data: bytes, on_progress: OnProgress) -> bytes:
    packer = zlib.compressobj(6, wbits=31)
    packed = []
    for start in range(0, len(data), _CHUNK_BYTES):
        on_progress(start / len(data))
        packed.append(packer.compress(data[start : start + _CHUNK_BYTES]))
    return b"".join([*packed, packer.flush()])


def write_tables(
    tables: Mapping[str, pl.DataFrame],
    folder: str | os.PathLike[str],
    suffix: str,
    on_progress: OnProgress = _no_progress,
) -> list[Path]:
    """Write each table as ``<folder>/<name>.<suffix>`` and return the files. ``suffix`` is "parquet" or "csv". Raises
    DdpDoctorError if a file cannot be written."""
    rows = max(sum(map(len, tables.values())), 1)

    def packed() -> Iterator[tuple[str, bytes]]:
        done = 0
        for name, table in tables.items():
            on_progress(done / rows)
            buffer = io.BytesIO()
            if suffix == "parquet":
                table.write_parquet(buffer)
            else:
                table.write_csv(buffer)
            yield f"{name}.{suffix}", buffer.getvalue()
            done += len(table)

    target = WrittenFolder(Path(folder), "exported tables")
    target.check(f"{name}.{suffix}" for name in tables)
    return target.write(packed())


def cut_steps(tables: Mapping[str, pl.DataFrame], first: int, last: int) -> dict[str, pl.DataFrame]:
    """The tables from the first start of step ``first`` to the last end of step ``last``, both included."""
    steps = tables["steps"].filter(pl.col("step").is_between(first, last))
    if steps.is_empty():
        return {name: table.clear() for name, table in tables.items()}
    start, end = int(steps["start_ns"].min()), int(steps["end_ns"].max())  # type: ignore[arg-type]
    stop = pl.col("start_ns") + pl.col("duration_ns")
    overlaps = {
        "collectives": (pl.col("arrival_ns") < end) & (pl.col("end_ns") > start),
        "events": (pl.col("start_ns") < end) & (stop > start),
        "details": (pl.col("start_ns") < end) & (stop > start),
        "counters": pl.col("time_ns").is_between(start, end),
    }
    return {
        name: steps if name == "steps" else table.filter(overlaps[name]) for name, table in tables.items()
    }


def fitting_steps(tables: Mapping[str, pl.DataFrame], max_slices: int = MAX_SLICES) -> tuple[int, int] | None:
    """(first, last) of consecutive steps with at most about ``max_slices`` slices of measured work. The steps are around the recorded
    kernels, or in the middle of the run without kernels. None if all steps fit or there are fewer than two."""
    measured = [tables[name] for name in ("steps", "collectives", "events")]
    slices = sum(len(table) for table in measured) + len(tables["collectives"])
    numbers = tables["steps"]["step"].unique().sort()
    if slices <= max_slices or len(numbers) < 2:
        return None
    keep = max(1, len(numbers) * max_slices // slices)
    begin = min(max(_middle_index(tables) - keep // 2, 0), len(numbers) - keep)
    return int(numbers[begin]), int(numbers[begin + keep - 1])


def _middle_index(tables: Mapping[str, pl.DataFrame]) -> int:
    """Index, in the sorted step numbers, of the step around which to cut."""
    numbers = tables["steps"]["step"].unique().sort().to_list()
    details = tables["details"] if "details" in tables else pl.DataFrame()
    kernels = details if details.is_empty() else details.filter(pl.col("track") != "sampled lines")
    if kernels.is_empty():
        return len(numbers) // 2
    at = kernels["start_ns"].sort()[len(kernels) // 2]
    before = tables["steps"].filter(pl.col("start_ns") <= at)["step"].to_list()
    return max(bisect_right(numbers, max(before, default=numbers[0])) - 1, 0)


def chrome_trace(
    tables: Mapping[str, pl.DataFrame],
    findings: Sequence[Finding],
    hosts: Mapping[int, str],
    on_progress: OnProgress = _no_progress,
    *,
    all_ranks: str = "all ranks",
) -> dict[str, Any]:
    """The trace in the JSON Object Format of the Trace Event Format, with complete events, counters and metadata events."""
    rank_tables = {name: table for name, table in tables.items() if "rank" in table.columns}
    ranks = sorted({int(rank) for table in rank_tables.values() for rank in table["rank"].unique()})
    origin = min((int(t[c].min()) for t, c in _start_columns(tables) if len(t)), default=0)  # type: ignore[arg-type]
    events: list[dict[str, Any]] = []
    late_slices = lateness(tables["steps"], tables["collectives"])
    for done, rank in enumerate(ranks):
        on_progress(done / len(ranks))
        rank_table = {name: table.filter(pl.col("rank") == rank) for name, table in rank_tables.items()}
        host = f" on {hosts[rank]}" if hosts.get(rank) else ""
        # Perfetto shows process 0 and thread 0 as the idle task.
        events += _process_events(
            rank + 1,
            f"rank {rank}{host}",
            rank + 1,
            rank_tracks(rank_table, late_slices.get(rank, [])),
            origin,
        )
    tracks, finding_pid = (
        finding_tracks(tables["steps"], findings, all_ranks),
        max(ranks, default=0) + 2,
    )
    if tracks:
        events += _process_events(finding_pid, "findings", 0, tracks, origin)
    events += _counter_events(finding_pid + 1, tables, origin)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"producer": "ddpdoctor", "origin_epoch_ns": str(origin)},
        "traceEvents": events,
    }


def _start_columns(tables: Mapping[str, pl.DataFrame]) -> list[tuple[pl.DataFrame, str]]:
    return [
        (tables["steps"], "start_ns"),
        (tables["collectives"], "arrival_ns"),
        (tables["events"], "start_ns"),
        *([(tables["details"], "start_ns")] if "details" in tables else []),
    ]


def _counter_events(pid: int, tables: Mapping[str, pl.DataFrame], origin: int) -> list[dict[str, Any]]:
    """Hosts and GPUs over time, as counters of one process."""
    if "counters" not in tables or tables["counters"].is_empty():
        return []
    events = _process_events(pid, "hosts and GPUs", 0, [], origin)
    for row in tables["counters"].filter(pl.col("time_ns") >= origin).iter_rows(named=True):
        name = row["field"].replace("_", " ").removesuffix(f" {row['unit']}").removesuffix(" percent")
        events.append(
            {
                "ph": "C",
                "pid": pid,
                "tid": pid * _MAX_TRACKS,
                "ts": (row["time_ns"] - origin) / 1e3,
                "name": f"{row['source']}: {name}",
                "cat": "telemetry",
                "args": {row["unit"]: row["value"]},
            }
        )
    return events


def _process_events(
    pid: int, name: str, sort_index: int, tracks: Sequence[tuple[str, list[Slice]]], origin: int
) -> list[dict[str, Any]]:
    first = pid * _MAX_TRACKS
    events = [_metadata_event(pid, first, "process_name", name=name)]
    events.append(_metadata_event(pid, first, "process_sort_index", sort_index=sort_index))
    for tid, (label, slices) in enumerate(tracks, first):
        events.append(_metadata_event(pid, tid, "thread_name", name=label))
        events.append(_metadata_event(pid, tid, "thread_sort_index", sort_index=tid))
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


def _metadata_event(pid: int, tid: int, name: str, /, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": name, "args": args}


_TRACKS = _STEP, _HOST, _ISSUED, _COMPUTE, _COMMUNICATION, _LATE = (
    *("step", "host and data", "host log"),
    *("compute", "communication", "late"),
)
"""Tracks of measured work, from top to bottom."""
_LABELS: dict[str, str] = {
    Component.DATA: "waiting for data",
    Component.EPOCH_START: "start of the loader",
    Component.COPY: "copy to device",
    Component.LOSS: "operators between phases: loss, clipping",
    Component.OUTSIDE: "other operators between phases",
    Component.COLLECTION: "garbage collection",
    Component.DEVICE_SYNC: "idle: host waited for device",
    Component.LAUNCH: "idle: host issues work",
}
"""Labels of events whose own names are unclear."""
_MIN_LATE_SHARE = 0.01
"""Lateness below this share of the median step is not drawn, because it is normal scatter."""
_SLACK_NS = 1_000
"""Slices of a track that overlap by less, because of rounding, are shortened instead of moved to a second track."""


class Slice(msgspec.Struct, frozen=True):
    """A bar on a track; times in ns."""

    start_ns: int
    end_ns: int
    name: str
    category: str
    args: dict[str, Any] = {}


def lateness(steps: pl.DataFrame, collectives: pl.DataFrame) -> dict[int, list[Slice]]:
    """Slices by rank, from the median arrival of all ranks at a collective to a later arrival of this rank."""
    median_step_ns = (steps["end_ns"] - steps["start_ns"]).median() if len(steps) else 0
    min_late_ns = _MIN_LATE_SHARE * (median_step_ns if isinstance(median_step_ns, int | float) else 0)
    collective_key = ("source", "kind", "operation", "group", "last_arrival_ns")
    # Relative to the last arrival, because a quantile is a double, which cannot represent epoch nanoseconds exactly.
    median_offset = (
        (pl.col("arrival_ns") - pl.col("last_arrival_ns")).quantile(0.5, "lower").over(collective_key)
    )
    middle = pl.col("last_arrival_ns") + median_offset.cast(pl.Int64)
    known = collectives.filter(pl.col("last_arrival_ns").is_not_null())
    matched = known.with_columns(middle.alias("middle_ns"))
    slices: dict[int, list[Slice]] = {}
    for row in matched.filter(pl.col("arrival_ns") - pl.col("middle_ns") > min_late_ns).iter_rows(named=True):
        late_ms = (row["arrival_ns"] - row["middle_ns"]) / 1e6
        name = f"late at {row['operation']}"
        item = Slice(
            row["middle_ns"], row["arrival_ns"], name, "late", {"late_ms": late_ms, "step": row["step"]}
        )
        slices.setdefault(row["rank"], []).append(item)
    return slices


def rank_tracks(
    tables: Mapping[str, pl.DataFrame], late_slices: Sequence[Slice]
) -> list[tuple[str, list[Slice]]]:
    """Tracks of one rank: first measured work, then annotations, operators, kernels and sampled lines."""
    slices_by_track: dict[str, list[Slice]] = {name: [] for name in _TRACKS}
    slices_by_track[_LATE] += late_slices
    for row in tables["steps"].iter_rows(named=True):
        args = {"marks": row["marks"]} if row["marks"] else {}
        slices_by_track[_STEP].append(
            Slice(row["start_ns"], row["end_ns"], f"step {row['step']}", "step", args)
        )
    has_both_sources = tables["events"]["source"].n_unique() > 1
    for row in tables["events"].iter_rows(named=True):
        # If there are also events of the device, the log shows what the host issued at that time.
        track = _COMPUTE if row["track"] == "compute" else _HOST
        track = _ISSUED if has_both_sources and row["source"] == "step-log" else track
        end = row["start_ns"] + row["duration_ns"]
        slices_by_track[track].append(
            Slice(row["start_ns"], end, _LABELS.get(row["name"], row["name"]), row["name"])
        )
    for row in tables["collectives"].iter_rows(named=True):
        slices_by_track[_COMMUNICATION] += _collective_slices(row)
    for row in tables["details"].iter_rows(named=True) if "details" in tables else ():
        end = row["start_ns"] + row["duration_ns"]
        slices_by_track.setdefault(row["track"], []).append(
            Slice(row["start_ns"], end, row["name"], "detail")
        )
    tracks = []
    for name in slices_by_track:
        lanes = _lanes(slices_by_track[name])
        tracks += [(name if n == 0 else f"{name} {n + 1}", lane) for n, lane in enumerate(lanes)]
    return tracks


def _collective_slices(row: Mapping[str, Any]) -> list[Slice]:
    operation = row["operation"]
    args = {
        name: row[name] for name in ("kind", "group", "step", "message_bytes") if row[name] not in (None, "")
    }
    if row["wait_ns"] is None:
        return [Slice(row["arrival_ns"], row["end_ns"], f"{operation}, not matched", "communication", args)]
    last_arrival_ns = row["arrival_ns"] + row["wait_ns"]
    return [
        Slice(row["arrival_ns"], last_arrival_ns, f"{operation}: wait", Part.COMM_WAIT, args),
        Slice(last_arrival_ns, row["end_ns"], f"{operation}: transfer", Part.COMM_TRANSFER, args),
    ]


def _lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Distribute slices over as few lanes as possible, sorted by time and without overlap within a lane."""
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
    """One track per finding with a slice over the steps in which it occurs. ``all_ranks``: the name for all recorded ranks."""
    tracks = []
    for finding in findings:
        finding_steps = steps
        if finding.steps:
            finding_steps = steps.filter(pl.col("step").is_between(finding.steps[0], finding.steps[-1]))
        if finding_steps.is_empty():
            continue
        args = {
            "rule": finding.rule,
            "severity": finding.severity,
            "ranks": words.rank_names(finding.ranks, all_ranks),
            "costs_ms_per_step": finding.costs_ms_per_step,
            "where": [
                " ← ".join(f"{one.file}:{one.line} {one.function}" for one in where.call_path)
                for where in finding.where
            ],
            "explanation": " ".join(finding.explanation.split()),
            "fixes": [fix.title for fix in finding.fixes],
        }
        start, end = int(finding_steps["start_ns"].min()), int(finding_steps["end_ns"].max())  # type: ignore[arg-type]
        tracks.append((finding.rule, [Slice(start, end, finding.title, "finding", args)]))
    return tracks
