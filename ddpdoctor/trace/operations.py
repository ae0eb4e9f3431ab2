"""Traces of pipeline- and data-parallel jobs as one Parquet table of operations, one row each: the format that
ByteDance published with "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI '25;
https://github.com/ByteDance-Seed/StragglerAnalysis, ``trace-<name>.parquet`` and beside it ``meta-<name>.yaml``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.errors import UnusableInput

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
    if file.suffix != ".parquet" or not file.is_file():
        return False
    import polars as pl

    try:
        return set(pl.read_parquet_schema(file)) >= _COLUMNS
    except (OSError, pl.exceptions.PolarsError):
        return False


def read_operations(path: str) -> Operations:
    """Reads one table; times in seconds.

    Rows without a time, a step or a place are left out and counted in ``notes``. Raises UnusableInput where
    the file is no such table or nothing is left of it.
    """
    import polars as pl

    try:
        table = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnusableInput(f"{path} cannot be read as Parquet: {reason}.") from error
    if missing := sorted(_COLUMNS - set(table.columns)):
        raise UnusableInput(f"{path} is no table of operations: it lacks the column(s) {', '.join(missing)}.")
    try:
        table = _typed(table)
    except pl.exceptions.PolarsError as error:
        raise UnusableInput(
            f"{path} has a column of the wrong type: {str(error).splitlines()[0]}."
        ) from error
    whole = table.filter(
        pl.all_horizontal(pl.col("optype", *_INTEGERS).is_not_null())
        & pl.col("start_ts").is_finite().fill_null(False)
        & (pl.col("duration").is_finite() & (pl.col("duration") >= 0)).fill_null(False)
    ).sort("step", "dp_rank", "stage", "start_ts", "seq_id", "optype")
    if whole.is_empty():
        raise UnusableInput(f"{path} holds no operation that has a kind, a place, a start and a duration.")
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
        found: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        found = None
    size = found.get("world_size") if isinstance(found, dict) else None
    if not isinstance(size, int) or size <= 0:
        notes.append(f"{file} names no world_size.")
        return None
    return size
