"""Finds tables of operations and reads one into :class:`Operations`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.sources import MAX_RANKS, open_local

from .parquet import INTEGERS, is_table, read_table
from .table import Operations

if TYPE_CHECKING:  # imported where a table is read: most analyses read none
    import polars as pl

_PLACES = ("dp_rank", "stage", "rank", "step")
_PARTS = ("seq_id", "mc", "gmc", "mb_id")
"""-1 if the operation belongs to none."""
_MAX_NUMBER = 10**9
"""Upper bound of ranks, steps and micro-batches."""
_LATEST_S, _LONGEST_S = 2.0**32, 2.0**30
"""Upper bounds, s: times are relative to 1970 or later, and no operation takes 34 years."""
_MAX_SIMULATED = 10**10
"""Most operations times simulations (one per replica and stage); the published jobs have less than a hundredth."""
_META_BYTES = 1 << 20
"""Most bytes of the metadata file that are read; the published files have some hundred."""


def find_operations(path: str) -> list[str]:
    """The tables of operations at ``path``: the file itself, or those directly in the folder; may be empty."""
    place = Path(path)
    try:
        files = sorted(place.glob("*.parquet")) if place.is_dir() else [place]
    except OSError:
        return []  # find_traces raises the error
    return [str(file) for file in files if _is_readable_table(file)]


def _is_readable_table(file: Path) -> bool:
    try:
        return is_table(file)
    except OSError:
        return False


def read_operations(path: str) -> Operations:
    """Reads one table; times in seconds.

    Rows with a missing or invalid time, step, rank, stage or replica are skipped and counted in ``notes``. Raises
    UnusableInput if the file is no such table, has no valid row, or would take days to analyse.
    """
    import polars as pl

    table = read_table(path)
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
    """Raises UnusableInput if the rows are empty, take no time, or are too many to simulate."""
    if whole.is_empty():
        raise UnusableInput(f"{path} holds no operation that has a kind, a place, a start and a duration.")
    replays = sum(whole[name].n_unique() for name in ("dp_rank", "stage"))
    if replays * whole.height > _MAX_SIMULATED:
        raise UnusableInput(
            f"{path} is too large to analyse: {whole.height} operations, to be replayed {replays} times."
        )
    if not whole["duration"].max():
        raise UnusableInput(f"{path} holds no operation that takes any time.")


def _world_size(trace: Path, notes: list[str]) -> int | None:
    """Ranks of the whole job, from the metadata file next to its table; None without one."""
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
