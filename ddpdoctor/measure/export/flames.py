"""The stack samples of each rank as flame graphs: all of its steps, and those in which it came late against the others.

The format is that of speedscope (https://www.speedscope.app/file-format-schema.json), which opens it in the browser without a server.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from ddpdoctor.measure.align import align_logs, exclude_suspended
from ddpdoctor.measure.flames import late_steps, samples_in
from ddpdoctor.measure.graph import build_graphs
from ddpdoctor.measure.places import CodeLine
from ddpdoctor.measure.sourcelines import Samples, samples_of
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.telemetry import HostTelemetry

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def flame_graphs(
    logs: Sequence[RankLog], telemetry: Mapping[str, HostTelemetry], wanted: Collection[int]
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(rank, speedscope document of the ``wanted`` steps, or None without samples). Each of ``logs`` must have steps."""
    recorded, _ = exclude_suspended(align_logs(logs)[0], telemetry)
    graph = build_graphs(recorded, []).log if recorded else None
    if graph is None:
        return
    samples, (measured, late) = samples_of(recorded), late_steps(graph)
    for position, log in enumerate(recorded):
        numbers = {step.number for step in log.steps}.intersection(wanted)
        groups = [("all steps", numbers)]
        own = late[position] & numbers
        if own and (usual := measured & numbers - own):
            groups += [("late steps", own), ("usual steps", usual)]
        yield log.rank, _flame_graph(samples, position, groups)


def _flame_graph(
    samples: Samples, position: int, groups: Sequence[tuple[str, set[int]]]
) -> dict[str, Any] | None:
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
    """A speedscope profile of some steps, in ms per step: weights add up to the steps' mean length. New frames are added to ``frames``
    (frame → index)."""
    found = samples_in(samples, position, numbers)
    count = sum(found.stacks.values())
    if not count:
        return None
    each_ms = found.mean_ms / count
    weights = {
        tuple(frames.setdefault(line, len(frames)) for line in reversed(stack)): each_ms * weight
        for stack, weight in found.stacks.items()
    }
    rank = samples.ranks[position].log.rank
    return {
        "type": "sampled",
        "name": f"rank {rank}: {which} ({found.steps:,}, {round(count):,} samples; ms per step)",
        "unit": "milliseconds",
        "startValue": 0,
        "endValue": found.mean_ms,
        "samples": sorted(weights),
        "weights": [weights[stack] for stack in sorted(weights)],
    }
