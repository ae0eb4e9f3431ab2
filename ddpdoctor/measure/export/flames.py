"""The stack samples of each rank as flame graphs: all of its steps, and those in which it came late against the others.

The format is that of speedscope (https://www.speedscope.app/file-format-schema.json), which reads it from a file, in the browser alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import polars as pl
from msgspec.structs import replace

from ddpdoctor.measure.flames import LATE_SHARE, Stacks, stacks_of
from ddpdoctor.measure.metrics import typical_arrival
from ddpdoctor.measure.sourcelines import at_holders
from ddpdoctor.measure.steplog import RankLog

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def late_steps(collectives: pl.DataFrame, steps: pl.DataFrame) -> dict[int, set[int]]:
    """By rank the steps in which it arrived late at a collective of all ranks, against the median rank, by
    ``LATE_SHARE`` of the median step. Both frames are those of :func:`recorded_tables`; empty for one rank alone.
    """
    ranks = sorted(collectives["rank"].unique().to_list())
    if len(ranks) < 2 or steps.is_empty():
        return {rank: set() for rank in ranks}
    least_ns = LATE_SHARE * float(np.median((steps["end_ns"] - steps["start_ns"]).to_numpy()))
    matched = collectives.filter(pl.col("last_arrival_ns").is_not_null() & pl.col("step").is_not_null())
    # A collective's parts on all ranks have its last arrival in common.
    wide = matched.pivot(
        on="rank", index=["step", "last_arrival_ns"], values="arrival_ns", aggregate_function="first"
    )
    columns = [str(rank) for rank in ranks if str(rank) in wide.columns]
    whole = wide.drop_nulls(columns)
    if len(columns) < 2 or whole.is_empty():
        return {rank: set() for rank in ranks}
    arrivals = whole.select(columns).to_numpy().astype(np.float64)
    arrivals -= arrivals.min(axis=1, keepdims=True)
    late = arrivals - typical_arrival(arrivals) >= least_ns
    numbers = whole["step"].to_numpy()
    found = {int(name): set(numbers[late[:, i]].tolist()) for i, name in enumerate(columns)}
    return {rank: found.get(rank, set()) for rank in ranks}


def flame_graphs(
    logs: Sequence[RankLog], late: Mapping[int, set[int]], wanted: Collection[int]
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Each rank with its speedscope document of the ``wanted`` steps, of which it was ``late`` in some; None where no samples were taken
    of them."""
    for log in at_holders(logs):
        steps = [step for step in log.steps if step.number in wanted]
        yield log.rank, _flame_graph(replace(log, steps=steps), late.get(log.rank, set()))


def _flame_graph(log: RankLog, late: set[int]) -> dict[str, Any] | None:
    stacks = stacks_of(log)
    numbers = set(stacks.length_ms)
    groups = [("all steps", numbers)]
    if late and not late >= numbers:
        groups += [("late steps", late & numbers), ("usual steps", numbers - late)]
    profiles = [
        profile
        for name, chosen in groups
        if (profile := _profile(f"rank {log.rank}: {name}", stacks, chosen)) is not None
    ]
    if not profiles:
        return None
    return {
        "$schema": SCHEMA,
        "name": f"rank {log.rank}",
        "exporter": "ddpdoctor",
        "activeProfileIndex": 0,
        "shared": {
            "frames": [
                {
                    "name": f"{line.function} ({PurePath(line.file).name}:{line.line})",
                    "file": line.file,
                    "line": line.line,
                }
                for line in stacks.frames
            ]
        },
        "profiles": profiles,
    }


def _profile(name: str, stacks: Stacks, numbers: set[int]) -> dict[str, Any] | None:
    """The samples of some steps, weighed so that they add up to those steps' mean length, whatever their number."""
    samples = sorted(stack for number, found in stacks.by_step if number in numbers for stack in found)
    if not samples:
        return None
    mean_ms = sum(stacks.length_ms[number] for number in numbers) / len(numbers)
    return {
        "type": "sampled",
        "name": f"{name} ({len(numbers):,}, {len(samples):,} samples; ms per step)",
        "unit": "milliseconds",
        "startValue": 0,
        "endValue": mean_ms,
        "samples": samples,
        "weights": [mean_ms / len(samples)] * len(samples),
    }
