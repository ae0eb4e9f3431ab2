"""The recorded data as polars data frames, for the user's own analyses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import polars as pl

from ddpdoctor.measure.export import recorded_tables
from ddpdoctor.measure.flow import summaries

from .driver import prepare
from .inputs import Options


@dataclass(frozen=True, repr=False)
class Frames:
    """Data of all ranks on one clock. Times are int64 ns since 1970, unless the traces have their own clocks."""

    steps: pl.DataFrame
    """One row for each rank and step."""
    collectives: pl.DataFrame
    """One row for each rank and collective, with its wait for the last rank and its transfer."""
    events: pl.DataFrame
    """One row for each interval of work."""
    ranks: pl.DataFrame
    """One row for each rank: mean step, lateness, and the breakdown of its step, ms."""

    def __repr__(self) -> str:
        sizes = ", ".join(f"{each.name} {len(getattr(self, each.name)):,}" for each in fields(self))
        return f"<Frames: rows of {sizes}>"


_RANKS = {
    "rank": pl.Int32,
    "host": pl.String,
    "device": pl.String,
    "step_ms": pl.Float64,
    "late_ms": pl.Float64,
    "caused_wait_ms": pl.Float64,
}
"""Fields of :class:`~ddpdoctor.diagnose.diagnosis.RankSummary` that are columns; its breakdown adds one column per part."""


def frames(paths: Sequence[str], options: Options) -> Frames:
    """Read, align and measure. Raises UnusableInput if there is nothing to measure."""
    prepared = prepare(paths, options)
    recorded = prepared.logs, prepared.windows, prepared.inputs.telemetry
    tables = recorded_tables(*recorded)
    ranks = summaries(*recorded, options.progress) if prepared.logs or prepared.windows else []
    parts = dict.fromkeys(part for each in ranks for part in each.breakdown_ms)
    rows = [
        {name: getattr(each, name) for name in _RANKS}
        | {f"{part}_ms": each.breakdown_ms.get(part) for part in parts}
        for each in ranks
    ]
    of_ranks = pl.DataFrame(rows, schema=_RANKS | {f"{part}_ms": pl.Float64 for part in parts})
    return Frames(tables.steps, tables.collectives, tables.events, of_ranks)
