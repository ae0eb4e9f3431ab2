"""All ranks on one clock as a Chrome trace, for https://ui.perfetto.dev, and the same data as Parquet and CSV.

The tables are those of ``ddpdoctor.measure.export``; their columns are described there and in ``docs/export.md``. In the trace each
rank is a process with tracks for steps, computation, host work and communication, which separates waiting from transfer, and below
them named operators, kernels and sampled lines. The findings are a process above the ranks, hosts and GPUs one below.
"""

from __future__ import annotations

import io
import os
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from ddpdoctor.diagnose.diagnosis import Finding
from ddpdoctor.report.json_output import encoded
from ddpdoctor.report.timeline_tracks import Slice, finding_tracks, lateness, rank_tracks
from ddpdoctor.written import TIMELINE, WrittenFolder, write_file

MOST_SLICES = 400_000
"""Most slices of measured work, which browsers can still open; longer runs are cut to some consecutive steps."""

_MOST_TRACKS = 1_000
"""Thread numbers reserved for each process, so that no two processes share one."""
_DRAWING_SHARE = 0.5
"""Share of the time for a compressed timeline before its compression starts, for the progress line."""
_CHUNK_BYTES = 4 << 20
"""Bytes compressed at a time, in about 50 ms."""

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
    drawn = _DRAWING_SHARE if compressed else 1.0
    data = encoded(
        chrome_trace(tables, findings, hosts, lambda part: on_progress(drawn * part), all_ranks=all_ranks)
    )
    if compressed:
        data = _compressed(data, lambda part: on_progress(drawn + (1 - drawn) * part))
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
    """Write each table as ``<folder>/<name>.<suffix>``, which is "parquet" or "csv"; returns the files. Raises DdpDoctorError if one
    cannot be written."""
    rows = max(sum(map(len, tables.values())), 1)

    def packed() -> Iterator[tuple[str, bytes]]:
        done = 0
        for name, table in tables.items():
            on_progress(done / rows)
            into = io.BytesIO()
            (table.write_parquet if suffix == "parquet" else table.write_csv)(into)
            yield f"{name}.{suffix}", into.getvalue()
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


def steps_that_fit(tables: Mapping[str, pl.DataFrame], most: int = MOST_SLICES) -> tuple[int, int] | None:
    """(first, last) of consecutive steps with at most about ``most`` slices of measured work: around the recorded kernels if there are
    any, else in the middle of the run. None if all steps fit or none are known."""
    measured = [tables[name] for name in ("steps", "collectives", "events")]
    slices = sum(len(table) for table in measured) + len(tables["collectives"])
    numbers = tables["steps"]["step"].unique().sort()
    if slices <= most or len(numbers) < 2:
        return None
    keep = max(1, len(numbers) * most // slices)
    begin = min(max(_middle(tables) - keep // 2, 0), len(numbers) - keep)
    return int(numbers[begin]), int(numbers[begin + keep - 1])


def _middle(tables: Mapping[str, pl.DataFrame]) -> int:
    """Index, in the sorted step numbers, of the step around which to cut."""
    numbers = tables["steps"]["step"].unique().sort().to_list()
    named = tables["details"] if "details" in tables else pl.DataFrame()
    kernels = named if named.is_empty() else named.filter(pl.col("track") != "sampled lines")
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
    """The trace in the JSON Object Format of the Trace Event Format: complete events, counters and names."""
    rank_tables = {name: table for name, table in tables.items() if "rank" in table.columns}
    ranks = sorted({int(rank) for table in rank_tables.values() for rank in table["rank"].unique()})
    origin = min((int(t[c].min()) for t, c in _starts(tables) if len(t)), default=0)  # type: ignore[arg-type]
    events: list[dict[str, Any]] = []
    late = lateness(tables["steps"], tables["collectives"])
    for done, rank in enumerate(ranks):
        on_progress(done / len(ranks))
        rank_table = {name: table.filter(pl.col("rank") == rank) for name, table in rank_tables.items()}
        host = f" on {hosts[rank]}" if hosts.get(rank) else ""
        # Perfetto takes process and thread 0 for the idle task.
        events += _process(
            rank + 1, f"rank {rank}{host}", rank + 1, rank_tracks(rank_table, late.get(rank, [])), origin
        )
    marked, finding_pid = finding_tracks(tables["steps"], findings, all_ranks), max(ranks, default=0) + 2
    if marked:
        events += _process(finding_pid, "findings", 0, marked, origin)
    events += _counters(finding_pid + 1, tables, origin)
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
        *([(tables["details"], "start_ns")] if "details" in tables else []),
    ]


def _counters(pid: int, tables: Mapping[str, pl.DataFrame], origin: int) -> list[dict[str, Any]]:
    """Hosts and GPUs over time, as counters of one process."""
    if "counters" not in tables or tables["counters"].is_empty():
        return []
    events = _process(pid, "hosts and GPUs", 0, [], origin)
    for row in tables["counters"].filter(pl.col("time_ns") >= origin).iter_rows(named=True):
        name = row["field"].replace("_", " ").removesuffix(f" {row['unit']}").removesuffix(" percent")
        events.append(
            {
                "ph": "C",
                "pid": pid,
                "tid": pid * _MOST_TRACKS,
                "ts": (row["time_ns"] - origin) / 1e3,
                "name": f"{row['source']}: {name}",
                "cat": "telemetry",
                "args": {row["unit"]: row["value"]},
            }
        )
    return events


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
