"""Reads the Parquet file of a table of operations safely.

A malicious Parquet file can crash the process that reads it, so another process reads it first.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.sources import open_local

if TYPE_CHECKING:  # imported where a table is read: most analyses read none
    import polars as pl

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
"""Program that reads the same columns, unless the file has more rows than a table of operations can have."""
_SCHEMA_BYTES = 1 << 20
"""Bytes at the start of the file's metadata that are searched for column names: enough for tens of thousands of columns."""
_PROBE_TIMEOUT_S = 600.0
"""Timeout of the probe; tables are read in seconds."""


def is_table(file: Path) -> bool:
    """Whether ``file`` is a table of operations, by its name and its columns. Raises OSError."""
    if (
        file.suffix != ".parquet"
        or not file.is_file()
        or not _may_be_table(file)
        or _unreadable_reason(str(file))
    ):
        return False
    import polars as pl

    try:
        with open_local(str(file)) as stream:
            return set(pl.read_parquet_schema(stream)) >= COLUMNS
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException):
        return False


def _may_be_table(file: Path) -> bool:
    """Whether the file's metadata contains the names of all columns. Avoids starting a process for each dataset file next to
    traces. Raises OSError."""
    with open_local(str(file)) as stream:
        end = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, end - 8))
        length = int.from_bytes(stream.read(4), "little")
        stream.seek(max(0, end - 8 - length))
        schema = stream.read(min(length, _SCHEMA_BYTES))
    return all(name.encode() in schema for name in COLUMNS)


def read_table(path: str) -> pl.DataFrame:
    """The columns of the table at ``path``, one row per operation.

    Raises UnusableInput if it is no such table, or has more rows than its size allows.
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
        raise UnusableInput(f"{path} cannot be read as Parquet: {_first_line(error)}.") from error
    try:
        return _typed(table)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise UnusableInput(f"{path} has a column of the wrong type: {_first_line(error)}.") from error


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


def _typed(table: pl.DataFrame) -> pl.DataFrame:
    import polars as pl

    return table.select(
        pl.col("optype").cast(pl.String),
        pl.col("start_ts", "duration").cast(pl.Float64),
        *(pl.col(name).cast(pl.Int64) for name in INTEGERS),
    )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
