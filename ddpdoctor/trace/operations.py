"""Traces of pipeline- and data-parallel jobs as one Parquet table of operations, one row each: the format that
ByteDance published with "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI '25;
https://github.com/ByteDance-Seed/StragglerAnalysis, ``trace-<name>.parquet`` and beside it ``meta-<name>.yaml``).
"""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.ranks import MOST_RANKS
from ddpdoctor.trace.source import open_binary

if TYPE_CHECKING:  # imported where a table is read: most analyses read none
    import polars as pl

Integers = NDArray[np.int64]

_INTEGERS = {
    "dp_rank": "replica",
    "stage": "stage",
    "rank": "rank",
    "step": "step",
    "seq_id": "sequence",
    "mc": "chunk",
    "gmc": "model_chunk",
    "mb_id": "micro_batch",
}
_PLACES = ("dp_rank", "stage", "rank", "step")
_PARTS = ("seq_id", "mc", "gmc", "mb_id")
"""-1 where the operation belongs to none."""
_MOST = 10**9
"""No rank, step or micro-batch has so high a number."""
_LATEST_S, _LONGEST_S = 2.0**32, 2.0**30
"""Seconds: times count from 1970 or later, and nothing takes 34 years."""
_FREE_ROWS = 1_000_000
"""A table may have so many rows, and beyond them one for each of its bytes."""
_MOST_REPLAYED = 10**10
"""Operations times replays, one for each replica and stage: the published jobs have less than a hundredth."""
_META_BYTES = 1 << 20
_TRIAL = """
import sys
import polars
columns = set(polars.read_parquet_schema(sys.argv[1]))
if columns >= set(sys.argv[2:]) and polars.scan_parquet(sys.argv[1]).select(polars.len()).collect().item() < 10**8:
    polars.read_parquet(sys.argv[1], columns=sys.argv[2:])
"""
_TRIAL_S = 600.0
_COLUMNS = {*_INTEGERS, "optype", "start_ts", "duration"}


@dataclass(frozen=True)
class Operations:
    """The operations of a job, N rows sorted by step, replica, stage and start."""

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
    """[N] model chunk within the stage; -1 where the operation belongs to none."""
    model_chunk: Integers
    """[N] model chunk within the model; -1 where the operation belongs to none."""
    micro_batch: Integers
    """[N] -1 where the operation belongs to none."""
    start_s: NDArray[np.float64]
    duration_s: NDArray[np.float64]
    world_size: int | None = None
    """Ranks of the whole job, tensor-parallel ones included; None where no metadata lies beside the trace."""
    notes: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of operations."""
        return len(self.kind)

    @property
    def end_s(self) -> NDArray[np.float64]:
        """[N]"""
        return self.start_s + self.duration_s

    def of_kind(self, *names: str) -> NDArray[np.bool_]:
        """[N] whether the operation is of one of these kinds."""
        return np.isin(self.kind, [i for i, name in enumerate(self.kinds) if name in names])

    def only(self, chosen: NDArray[np.bool_]) -> Operations:
        """The chosen rows ([N] booleans)."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        rows: dict[str, Any] = {k: v[chosen] for k, v in columns.items() if isinstance(v, np.ndarray)}
        return replace(self, **rows)


def find_operations(path: str) -> list[str]:
    """The tables of operations that ``path`` is or, as a folder, holds directly; empty where there are none."""
    place = Path(path)
    try:
        files = sorted(place.glob("*.parquet")) if place.is_dir() else [place]
        return [str(file) for file in files if _is_operations(file)]
    except OSError:
        return []  # who looks for traces there says what is wrong


def _is_operations(file: Path) -> bool:
    if file.suffix != ".parquet" or not file.is_file() or _fault(str(file)):
        return False
    import polars as pl

    try:
        with open_binary(str(file)) as stream:
            return set(pl.read_parquet_schema(stream)) >= _COLUMNS
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException):
        return False


def read_operations(path: str) -> Operations:
    """Reads one table; times in seconds.

    Rows without a time, a step or a place, or with one that cannot be, are left out and counted in ``notes``. Raises
    UnusableInput where the file is no such table, nothing is left of it, or it would take days to analyse.
    """
    import polars as pl

    table = _read(path)
    try:
        table = _typed(table)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise UnusableInput(f"{path} has a column of the wrong type: {_first_line(error)}.") from error
    whole = table.filter(
        pl.col("optype").is_not_null()
        & pl.all_horizontal(pl.col(*_PLACES).is_between(0, _MOST).fill_null(False))
        & pl.all_horizontal(pl.col(*_PARTS).is_between(-1, _MOST).fill_null(False))
        & pl.col("start_ts").is_between(-_LATEST_S, _LATEST_S).fill_null(False)
        & pl.col("duration").is_between(0, _LONGEST_S).fill_null(False)
    ).sort("step", "dp_rank", "stage", "start_ts", "seq_id", "optype")
    if whole.is_empty():
        raise UnusableInput(f"{path} holds no operation that has a kind, a place, a start and a duration.")
    replays = sum(whole[name].n_unique() for name in ("dp_rank", "stage"))
    if replays * whole.height > _MOST_REPLAYED:
        raise UnusableInput(
            f"{path} is too large to be analysed: {whole.height} operations, to be replayed {replays} times."
        )
    if not whole["duration"].max():
        raise UnusableInput(f"{path} holds no operation that takes any time.")
    notes = []
    if lost := table.height - whole.height:
        notes.append(f"{path}: {lost} operation(s) lack a time or a place and were left out.")
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
        **{ours: whole[theirs].to_numpy() for theirs, ours in _INTEGERS.items()},
    )


def _fault(path: str) -> str:
    """Why the Parquet file at ``path`` must not be read in this process, in words; "" where it can be.

    What reads Parquet can be made to abort the process by what is in the file, so another one tries first.
    """
    if not Path(path).is_file():
        return ""  # who opens it says what is wrong
    status = Path(path).stat()
    return _tried(path, status.st_size, status.st_mtime_ns)


@functools.cache
def _tried(path: str, size: int, mtime_ns: int) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TRIAL, path, *sorted(_COLUMNS)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "the process that tried to did not come to an end"
    return f"the process that tried to was ended by signal {-done.returncode}" if done.returncode < 0 else ""


def _read(path: str) -> pl.DataFrame:
    """The columns that are needed, of a file that has no more rows than its size can hold."""
    import polars as pl

    if fault := _fault(path):
        raise UnusableInput(f"{path} cannot be read as Parquet: {fault}.")
    try:
        with open_binary(path) as stream:
            columns = pl.read_parquet_schema(stream)
            if missing := sorted(_COLUMNS - set(columns)):
                raise UnusableInput(
                    f"{path} is no table of operations: it lacks the column(s) {', '.join(missing)}."
                )
            stream.seek(0)
            rows = pl.scan_parquet(stream).select(pl.len()).collect().item()
            if rows > _FREE_ROWS + Path(path).stat().st_size:
                raise UnusableInput(f"{path} is no table of operations: it has more rows than bytes.")
            stream.seek(0)
            return pl.read_parquet(stream, columns=sorted(_COLUMNS))
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise UnusableInput(f"{path} cannot be read as Parquet: {_first_line(error)}.") from error


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _typed(table: pl.DataFrame) -> pl.DataFrame:
    import polars as pl

    return table.select(
        pl.col("optype").cast(pl.String),
        pl.col("start_ts", "duration").cast(pl.Float64),
        *(pl.col(name).cast(pl.Int64) for name in _INTEGERS),
    )


def _world_size(trace: Path, notes: list[str]) -> int | None:
    file = trace.with_name(trace.stem.replace("trace-", "meta-", 1) + ".yaml")
    if file == trace or not file.is_file():
        return None
    import yaml

    try:
        with open_binary(str(file)) as stream:
            found: Any = yaml.safe_load(stream.read(_META_BYTES).decode())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        found = None
    size = found.get("world_size") if isinstance(found, dict) else None
    if type(size) is not int or not 0 < size < MOST_RANKS:
        notes.append(f"{file} names no world_size.")
        return None
    return size
