"""All ranks on one clock as a Chrome trace, for https://ui.perfetto.dev, and the same data as Parquet and CSV.

The tables are those of ``ddpdoctor.measure.export``, whose columns are described there and in
``docs/export.md``. Each rank is a process; its tracks hold the steps, computation, host work and
communication, where waiting for other ranks and transferring are slices of their own, and below them what
was recorded by name. The findings are a process of their own above the ranks, hosts and GPUs another.
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
"""Slices of measured work that a browser still opens without complaint; longer runs are cut to neighbouring steps."""

_MOST_TRACKS = 1_000
"""Thread numbers kept for each process, so that no two processes share one."""
_DRAWN = 0.5
"""Part of the time for a compressed timeline in which its slices are drawn; the rest goes into compressing them."""
_PACKED_BYTES = 4 << 20
"""Compressed at a time: a twentieth of a second or so."""

Told = Callable[[float], None]
"""Is told which part of an output is done, 0 to 1."""


def _no_progress(_: float) -> None:
    pass


def write_timeline(
    tables: Mapping[str, pl.DataFrame],
    findings: Sequence[Finding],
    hosts: Mapping[int, str],
    path: str | os.PathLike[str],
    told: Told = _no_progress,
    *,
    everybody: str = "all ranks",
) -> None:
    """Write the Chrome trace to ``path``, compressed where its name ends in ``.gz``.

    ``tables`` holds steps, collectives and events; ``told`` is called with the part that is done, 0 to 1; ``everybody``: what all
    recorded ranks are called. Raises DdpDoctorError where the file cannot be written.
    """
    compressed = os.fspath(path).endswith(".gz")
    drawn = _DRAWN if compressed else 1.0
    data = encoded(
        chrome_trace(tables, findings, hosts, lambda part: told(drawn * part), everybody=everybody)
    )
    if compressed:
        data = _compressed(data, lambda part: told(drawn + (1 - drawn) * part))
    write_file(path, data, TIMELINE)


def _compressed(data: bytes, told: Told) -> bytes:
    packer = zlib.compressobj(6, wbits=31)
    packed = []
    for start in range(0, len(data), _PACKED_BYTES):
        told(start / len(data))
        packed.append(packer.compress(data[start : start + _PACKED_BYTES]))
    return b"".join([*packed, packer.flush()])


def write_parquet(
    tables: Mapping[str, pl.DataFrame], folder: str | os.PathLike[str], told: Told = _no_progress
) -> list[Path]:
    """Write each table as ``<folder>/<name>.parquet``; the files. Raises DdpDoctorError where it cannot."""

    def packed(table: pl.DataFrame) -> bytes:
        into = io.BytesIO()
        table.write_parquet(into)
        return into.getvalue()

    return _write_tables(tables, folder, "parquet", packed, told)


def write_csv(
    tables: Mapping[str, pl.DataFrame], folder: str | os.PathLike[str], told: Told = _no_progress
) -> list[Path]:
    """Write each table as ``<folder>/<name>.csv``; the files. Raises DdpDoctorError where it cannot."""
    return _write_tables(tables, folder, "csv", lambda table: table.write_csv().encode(), told)


def _write_tables(
    tables: Mapping[str, pl.DataFrame],
    folder: str | os.PathLike[str],
    suffix: str,
    packed: Callable[[pl.DataFrame], bytes],
    told: Told,
) -> list[Path]:
    rows = max(sum(map(len, tables.values())), 1)

    def packed_ones() -> Iterator[tuple[str, bytes]]:
        done = 0
        for name, table in tables.items():
            told(done / rows)
            yield f"{name}.{suffix}", packed(table)
            done += len(table)

    target = WrittenFolder(Path(folder), "exported tables")
    target.check(f"{name}.{suffix}" for name in tables)
    return target.write(packed_ones())


def cut_steps(tables: Mapping[str, pl.DataFrame], first: int, last: int) -> dict[str, pl.DataFrame]:
    """The tables from the first start of step ``first`` to the last end of step ``last``, both included."""
    steps = tables["steps"].filter(pl.col("step").is_between(first, last))
    if steps.is_empty():
        return {name: table.clear() for name, table in tables.items()}
    start, end = int(steps["start_ns"].min()), int(steps["end_ns"].max())  # type: ignore[arg-type]
    stop = pl.col("start_ns") + pl.col("duration_ns")
    meets = {
        "collectives": (pl.col("arrival_ns") < end) & (pl.col("end_ns") > start),
        "events": (pl.col("start_ns") < end) & (stop > start),
        "details": (pl.col("start_ns") < end) & (stop > start),
        "counters": pl.col("time_ns").is_between(start, end),
    }
    return {name: steps if name == "steps" else table.filter(meets[name]) for name, table in tables.items()}


def steps_that_fit(tables: Mapping[str, pl.DataFrame], most: int = MOST_SLICES) -> tuple[int, int] | None:
    """(first, last) of neighbouring steps with at most about ``most`` slices of measured work: those around what was recorded by
    name, else in the middle of the run. None where all of them fit or no steps are known."""
    measured = [tables[name] for name in ("steps", "collectives", "events")]
    slices = sum(len(table) for table in measured) + len(tables["collectives"])
    numbers = tables["steps"]["step"].unique().sort()
    if slices <= most or len(numbers) < 2:
        return None
    keep = max(1, len(numbers) * most // slices)
    begin = min(max(_middle(tables) - keep // 2, 0), len(numbers) - keep)
    return int(numbers[begin]), int(numbers[begin + keep - 1])


def _middle(tables: Mapping[str, pl.DataFrame]) -> int:
    """Position, among the steps' numbers in order, of the step around which to cut."""
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
    told: Told = _no_progress,
    *,
    everybody: str = "all ranks",
) -> dict[str, Any]:
    """The trace in the JSON Object Format of the Trace Event Format: complete events and names."""
    of_ranks = {name: table for name, table in tables.items() if "rank" in table.columns}
    ranks = sorted({int(rank) for table in of_ranks.values() for rank in table["rank"].unique()})
    origin = min((int(t[c].min()) for t, c in _starts(tables) if len(t)), default=0)  # type: ignore[arg-type]
    events: list[dict[str, Any]] = []
    late = lateness(tables["steps"], tables["collectives"])
    for done, rank in enumerate(ranks):
        told(done / len(ranks))
        of_rank = {name: table.filter(pl.col("rank") == rank) for name, table in of_ranks.items()}
        host = f" on {hosts[rank]}" if hosts.get(rank) else ""
        # Process and thread 0 stand for the idle task in Perfetto's model.
        events += _process(
            rank + 1, f"rank {rank}{host}", rank + 1, rank_tracks(of_rank, late.get(rank, [])), origin
        )
    marked, beyond = finding_tracks(tables["steps"], findings, everybody), max(ranks, default=0) + 2
    if marked:
        events += _process(beyond, "findings", 0, marked, origin)
    events += _counted(beyond + 1, tables, origin)
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


def _counted(pid: int, tables: Mapping[str, pl.DataFrame], origin: int) -> list[dict[str, Any]]:
    """Hosts and GPUs over time, as counters of a process of their own."""
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
