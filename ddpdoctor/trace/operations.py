"""Reads a Parquet table with the operations of a pipeline- and data-parallel job, one row per operation.

ByteDance published this format with "Understanding Stragglers in Large Model Training Using What-if Analysis"
(OSDI '25; https://github.com/ByteDance-Seed/StragglerAnalysis): ``trace-<name>.parquet`` and next to it
``meta-<name>.yaml``. The result is :class:`Operations`. It covers a whole job and has no events, so it is not a format of
:mod:`ddpdoctor.trace.formats` and is measured by :mod:`ddpdoctor.measure.pipeline`. A malicious Parquet file can crash the process that
reads it, so another process reads it first.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.sources import MAX_RANKS, first_line, open_local

if TYPE_CHECKING:  # imported when a table is read; most analyses read none
    import polars as pl

Integers = NDArray[np.int64]


class Operations(msgspec.Struct, frozen=True):
    """Operations of a job, N rows sorted by step, replica, stage and start."""

    source: str
    kinds: tuple[str, ...]
    """Names of the kinds of operations."""
    kind: Integers
    """[N] position in ``kinds``."""
    replica: Integers
    """[N] data-parallel rank."""
    stage: Integers
    """[N] pipeline stage."""
    rank: Integers
    """[N] rank of the process that was traced for this replica and stage."""
    step: Integers
    sequence: Integers
    """[N] number among the operations of the same kind, rank and step, by start."""
    chunk: Integers
    """[N] model chunk within the stage; -1 for none."""
    model_chunk: Integers
    """[N] model chunk within the model; -1 for none."""
    micro_batch: Integers
    """[N] micro-batch; -1 for none."""
    start_s: NDArray[np.float64]
    duration_s: NDArray[np.float64]
    world_size: int | None = None
    """Ranks of the whole job, including tensor-parallel ones; None without a metadata file."""
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of operations."""
        return len(self.kind)

    @property
    def end_s(self) -> NDArray[np.float64]:
        """[N] end of each operation, s."""
        return self.start_s + self.duration_s

    def of_kind(self, *names: str) -> NDArray[np.bool_]:
        """[N] whether the operation has one of these kinds."""
        return np.isin(self.kind, [i for i, name in enumerate(self.kinds) if name in names])

    def select(self, chosen: NDArray[np.bool_]) -> Operations:
        """The rows of the mask ``chosen`` [N]."""
        columns = msgspec.structs.asdict(self)
        rows: dict[str, Any] = {k: v[chosen] for k, v in columns.items() if isinstance(v, np.ndarray)}
        return replace(self, **rows)


INTEGERS = {
    "dp_rank": "replica",
    "stage": "stage",
    "rank": "rank",
    "step": "step",
    "seq_id": "sequence",
    "mc": "chunk",
    "gmc": "model_chunk",
    "mb_id": "micro_batch",
}
"""Integer columns of the file → names in :class:`Operations`."""
COLUMNS = {*INTEGERS, "optype", "start_ts", "duration"}
"""Columns that are read; a table may have more."""
_FREE_ROWS = 1_000_000
"""A table may have this many rows plus one per byte of its file."""
_PROBE = """
import sys
import polars
columns = set(polars.read_parquet_schema(sys.argv[1]))
if columns >= set(sys.argv[2:]) and polars.scan_parquet(sys.argv[1]).select(polars.len()).collect().item() < 10**8:
    polars.read_parquet(sys.argv[1], columns=sys.argv[2:])
"""
"""Program that reads the same columns, unless the file has too many rows for a table of operations."""
_SCHEMA_BYTES = 1 << 20
"""Number of bytes at the start of the file's metadata that are searched for column names, enough for tens of thousands of columns."""
_PROBE_TIMEOUT_S = 600.0
"""Timeout of the probe; tables are read in seconds."""


def find_operations(path: str) -> list[str]:
    """The tables of operations at ``path``: the file itself, or files directly in the folder. May be empty."""
    place = Path(path)
    try:
        files = sorted(place.glob("*.parquet")) if place.is_dir() else [place]
    except OSError:
        return []  # find_traces raises the error
    return [str(file) for file in files if _is_table(file)]


def _is_table(file: Path) -> bool:
    """Whether ``file`` is a table of operations, by its name and its columns."""
    try:
        is_parquet = file.suffix == ".parquet" and file.is_file()
        if not is_parquet or not _may_be_table(file) or _unreadable_reason(str(file)):
            return False
    except OSError:
        return False
    import polars as pl

    try:
        with open_local(str(file)) as stream:
            return set(pl.read_parquet_schema(stream)) >= COLUMNS
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException):
        return False


def _may_be_table(file: Path) -> bool:
    """Whether the file's metadata contains the names of all columns. Used so that no process is started for each dataset file next to
    traces. Raises OSError."""
    with open_local(str(file)) as stream:
        end = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, end - 8))
        length = int.from_bytes(stream.read(4), "little")
        stream.seek(max(0, end - 8 - length))
        schema = stream.read(min(length, _SCHEMA_BYTES))
    return all(name.encode() in schema for name in COLUMNS)


def _read_table(path: str) -> pl.DataFrame:
    """The columns of the table at ``path``, one row per operation.

    Raises UnusableInput if it is not a table of operations, or has more rows than its size allows.
    """
    import polars as pl

    if why := _unreadable_reason(path):
        raise UnusableInput(f"{path} cannot be read as Parquet: {why}.")
    try:
        with open_local(path) as stream:
            columns = pl.read_parquet_schema(stream)
            if missing := sorted(COLUMNS - set(columns)):
                raise UnusableInput(
                    f"{path} is not a table of operations: it lacks the column(s) {', '.join(missing)}."
                )
            stream.seek(0)
            rows = pl.scan_parquet(stream).select(pl.len()).collect().item()
            if rows > _FREE_ROWS + Path(path).stat().st_size:
                raise UnusableInput(f"{path} is not a table of operations: it has more rows than bytes.")
            stream.seek(0)
            table = pl.read_parquet(stream, columns=sorted(COLUMNS))
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise UnusableInput(f"{path} cannot be read as Parquet: {first_line(error)}.") from error
    try:
        return table.select(
            pl.col("optype").cast(pl.String),
            pl.col("start_ts", "duration").cast(pl.Float64),
            *(pl.col(name).cast(pl.Int64) for name in INTEGERS),
        )
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise UnusableInput(f"{path} has a column of the wrong type: {first_line(error)}.") from error


def _unreadable_reason(path: str) -> str:
    """Why the Parquet file at ``path`` must not be read in this process; "" if it can be."""
    if not Path(path).is_file():
        return ""  # opening it raises the error
    status = Path(path).stat()
    return _crash_reason(path, status.st_size, status.st_mtime_ns)


@functools.cache
def _crash_reason(path: str, size: int, mtime_ns: int) -> str:
    import subprocess

    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE, path, *sorted(COLUMNS)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "the process that tried to did not finish"
    return f"the process that tried to was ended by signal {-done.returncode}" if done.returncode < 0 else ""


_PLACES = ("dp_rank", "stage", "rank", "step")
_PARTS = ("seq_id", "mc", "gmc", "mb_id")
"""Columns that are -1 if the operation has no such number."""
_MAX_NUMBER = 10**9
"""Upper limit of ranks, steps and micro-batches."""
_LATEST_S, _LONGEST_S = 2.0**32, 2.0**30
"""Upper limits of times (relative to 1970 or later) and durations (34 years), s."""
_MAX_SIMULATED = 10**10
"""Upper limit of operations times simulations (one per replica and stage). The published jobs have less than a hundredth."""
_META_BYTES = 1 << 20
"""Most bytes read from the metadata file. The published files have some hundred."""


def read_operations(path: str) -> Operations:
    """Reads one table, with times in seconds.

    Rows with a missing or invalid time, step, rank, stage or replica are skipped and counted in ``notes``. Raises
    UnusableInput if the file is not a table of operations, has no valid row, or would take days to analyse.
    """
    import polars as pl

    table = _read_table(path)
    whole = _complete_rows(table)
    _check(path, whole)
    notes = []
    if lost := table.height - whole.height:
        notes.append(f"{path}: {lost} operation(s) lack a time or a place and were skipped.")
    kinds = tuple(sorted(whole["optype"].unique().to_list()))
    position = {name: i for i, name in enumerate(kinds)}
    return Operations(
        source=path,
        kinds=kinds,
        kind=whole["optype"].replace_strict(position, return_dtype=pl.Int64).to_numpy(),
        start_s=whole["start_ts"].to_numpy(),
        duration_s=whole["duration"].to_numpy(),
        world_size=_world_size(Path(path), notes),
        notes=notes,
        **{field: whole[column].to_numpy() for column, field in INTEGERS.items()},
    )


def _complete_rows(table: pl.DataFrame) -> pl.DataFrame:
    """The rows with valid values in all columns, sorted."""
    import polars as pl

    return table.filter(
        pl.col("optype").is_not_null()
        & pl.all_horizontal(pl.col(*_PLACES).is_between(0, _MAX_NUMBER).fill_null(False))
        & pl.all_horizontal(pl.col(*_PARTS).is_between(-1, _MAX_NUMBER).fill_null(False))
        & pl.col("start_ts").is_between(-_LATEST_S, _LATEST_S).fill_null(False)
        & pl.col("duration").is_between(0, _LONGEST_S).fill_null(False)
    ).sort("step", "dp_rank", "stage", "start_ts", "seq_id", "optype")


def _check(path: str, whole: pl.DataFrame) -> None:
    """Raises UnusableInput if there are no rows, no row with a duration above 0, or too many rows to simulate."""
    if whole.is_empty():
        raise UnusableInput(f"{path} holds no operation that has a kind, a place, a start and a duration.")
    replays = sum(whole[name].n_unique() for name in ("dp_rank", "stage"))
    if replays * whole.height > _MAX_SIMULATED:
        raise UnusableInput(
            f"{path} is too large to analyze: {whole.height} operations, to be replayed {replays} times."
        )
    if not whole["duration"].max():
        raise UnusableInput(f"{path} holds no operation that takes any time.")


def _world_size(trace: Path, notes: list[str]) -> int | None:
    """World size from the metadata file next to the table; None without one."""
    file = trace.with_name(trace.stem.replace("trace-", "meta-", 1) + ".yaml")
    if file == trace or not file.is_file():
        return None
    import yaml

    try:
        with open_local(str(file)) as stream:
            metadata: Any = yaml.safe_load(stream.read(_META_BYTES).decode())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        metadata = None
    size = metadata.get("world_size") if isinstance(metadata, dict) else None
    if type(size) is not int or not 0 < size < MAX_RANKS:
        notes.append(f"{file} names no world_size.")
        return None
    return size
