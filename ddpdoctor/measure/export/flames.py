"""The stack samples of each rank as flame graphs: all of its steps, and those in which it came late against the others.

The format is that of speedscope (https://www.speedscope.app/file-format-schema.json), which reads it from a file, in the browser alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import polars as pl

from ddpdoctor.measure.flames import LATE_SHARE, samples_in
from ddpdoctor.measure.metrics import typical_arrival
from ddpdoctor.measure.places import CodeLine
from ddpdoctor.measure.sourcelines import Samples, samples_of
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
    samples = samples_of(logs)
    for position, log in enumerate(logs):
        numbers = {step.number for step in log.steps}.intersection(wanted)
        yield log.rank, _flame_graph(samples, position, numbers, late.get(log.rank, set()))


def _flame_graph(samples: Samples, position: int, numbers: set[int], late: set[int]) -> dict[str, Any] | None:
    groups = [("all steps", numbers)]
    if late and not late >= numbers:
        groups += [("late steps", late & numbers), ("usual steps", numbers - late)]
    frames: dict[CodeLine, int] = {}
    profiles = [_profile(samples, position, name, chosen, frames) for name, chosen in groups]
    if not frames:
        return None
    return {
        "$schema": SCHEMA,
        "name": f"rank {samples.ranks[position].log.rank}",
        "exporter": "ddpdoctor",
        "activeProfileIndex": 0,
        "shared": {
            "frames": [
                {
                    "name": f"{line.function} ({PurePath(line.file).name}:{line.line})",
                    "file": line.file,
                    "line": line.line,
                }
                for line in frames
            ]
        },
        "profiles": [profile for profile in profiles if profile is not None],
    }


def _profile(
    samples: Samples, position: int, which: str, numbers: set[int], frames: dict[CodeLine, int]
) -> dict[str, Any] | None:
    """The samples of some steps, weighed so that they add up to those steps' mean length, whatever their number; ``frames``, each with its
    place, gets those that are new."""
    taken = samples_in(samples, position, numbers)
    count = sum(taken.stacks.values())
    if not count:
        return None
    each_ms = taken.mean_ms / count
    weights = {
        tuple(frames.setdefault(line, len(frames)) for line in reversed(stack)): each_ms * weight
        for stack, weight in taken.stacks.items()
    }
    rank = samples.ranks[position].log.rank
    return {
        "type": "sampled",
        "name": f"rank {rank}: {which} ({taken.steps:,}, {round(count):,} samples; ms per step)",
        "unit": "milliseconds",
        "startValue": 0,
        "endValue": taken.mean_ms,
        "samples": sorted(weights),
        "weights": [weights[stack] for stack in sorted(weights)],
    }
