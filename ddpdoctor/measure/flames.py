"""Build flame graphs from the stack samples of training threads: the slowest rank in its late steps and other steps, and a median rank.

A sample consists of the user's lines, from the outermost recorded one to the current one, and the innermost line of the stack.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.measure.align import align_logs, exclude_suspended
from ddpdoctor.measure.graph import Graph, build_graphs
from ddpdoctor.measure.metrics import latest_ns
from ddpdoctor.measure.places import CodeLine, Stack
from ddpdoctor.measure.sourcelines import Samples, samples_of
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.summary import Flame, FlameFrame, RankSummary
from ddpdoctor.measure.telemetry import HostTelemetry

LATE_SHARE = 0.05
"""Share of the median step from which on a rank is late in a step. Lateness of this size is a warning."""


class Tuning(msgspec.Struct, frozen=True):
    """Limits of a flame graph."""

    fewest_samples: int = 8
    """Fewest samples of a graph. A graph of fewer is mostly noise."""
    least_share: float = 0.004
    """Smallest share of the samples for which a frame is drawn: about two pixels."""
    most_frames: int = 160
    """Most frames of one graph (the widest), to bound the size of a report."""
    most_levels: int = 24
    """Most levels of frames. A sample has fewer user lines."""


_TUNING = Tuning()


class StepSamples(msgspec.Struct, frozen=True):
    """The stack samples of some steps of a rank."""

    stacks: dict[Stack, float]
    """Number of samples by stack; a library's innermost line is part of the stack."""
    steps: int
    mean_ms: float
    """Mean length of the steps; 0 without steps."""


def samples_in(samples: Samples, position: int, numbers: Collection[int]) -> StepSamples:
    """Return the samples of the rank at ``position`` in the steps ``numbers``."""
    of_rank = samples.ranks[position]
    steps = of_rank.steps_of(numbers)
    weights = samples.weights(position, of_rank.in_steps(steps)).without_bursts
    lengths_ns = of_rank.lengths_ns[steps]
    mean_ms = float(lengths_ns.mean()) / 1e6 if len(lengths_ns) else 0.0
    return StepSamples(samples.by_stack(weights, whole=True), len(lengths_ns), mean_ms)


def flames(graph: Graph, samples: Samples, ranks: Sequence[RankSummary]) -> list[Flame]:
    """Return flame graphs of the slowest rank in its late steps and in its other steps (or in all steps, if it is never or always
    late), and of a median rank. Graphs with too few samples are missing. ``samples`` are those of the logs of ``graph``."""
    if not samples.stacks:
        return []
    (measured, late), late_ms = late_steps(graph), {each.rank: each.late_ms or 0.0 for each in ranks}
    order = sorted(
        range(len(samples.ranks)), key=lambda place: -late_ms.get(samples.ranks[place].log.rank, 0.0)
    )
    slowest, median_rank = order[0], order[(len(order) + 1) // 2] if len(order) > 1 else None
    recorded = set(samples.ranks[slowest].numbers.tolist())
    # Excluded steps (warm-up, profiled, evaluations) are in neither group.
    numbers = recorded & measured or recorded
    others = numbers - late[slowest]
    trees: list[_Tree | None] = [None]
    if late[slowest] and others:
        groups = {"late steps": late[slowest] & numbers, "other steps": others}
        trees = [_tree(samples, slowest, which, steps) for which, steps in groups.items()]
    if not all(trees):
        trees = [_tree(samples, slowest, "all steps", numbers)]
    if median_rank is not None:
        trees.append(_tree(samples, median_rank, "all steps", numbers))
    found = [tree for tree in trees if tree is not None]
    return [
        tree.flame(against=found[1] if place == 0 and len(found) > 1 else None)
        for place, tree in enumerate(found)
    ]


def late_steps(graph: Graph) -> tuple[set[int], list[set[int]]]:
    """Return all measured steps, and by position the steps in which the rank arrives later than the median rank by at least
    ``LATE_SHARE`` of the median step."""
    late: list[set[int]] = [set() for _ in graph.ranks]
    if not graph.groups:
        return set(), late
    least_ns = LATE_SHARE * float(np.median(graph.lengths_ns))
    for group in graph.groups if len(late) > 1 else ():
        by_rank = latest_ns(group) >= least_ns
        for position, steps in enumerate(late):
            steps.update(group.steps[by_rank[:, position]].tolist())
    return set(graph.numbers.tolist()), late


class _Node(msgspec.Struct):
    count: float = 0.0
    """Samples."""
    below: dict[CodeLine, _Node] = msgspec.field(default_factory=dict)


class _Tree(msgspec.Struct, frozen=True):
    """The samples of some steps of a rank."""

    rank: int
    which: str
    steps: int
    mean_ms: float
    root: _Node

    @property
    def sample_ms(self) -> float:
        """Time that one sample represents, ms per step."""
        return self.mean_ms / self.root.count

    def flame(self, against: _Tree | None) -> Flame:
        """Return the frames to draw, each with its difference to the same frame of ``against``."""
        found: list[tuple[FlameFrame, CodeLine]] = []
        self._add_frames(self.root, against, against.root if against else None, 0, 0.0, found)
        kept = sorted(found, key=lambda pair: -pair[0].ms)[: _TUNING.most_frames]
        kept.sort(key=lambda pair: (pair[0].depth, pair[0].start_ms))
        places = {line: place for place, line in enumerate(dict.fromkeys(line for _, line in kept))}
        return Flame(
            rank=self.rank,
            which=self.which,
            steps=self.steps,
            samples=round(self.root.count),
            mean_ms=round(self.mean_ms, 4),
            against=None if against is None else f"rank {against.rank}, {against.which}",
            places=list(places),
            frames=[msgspec.structs.replace(frame, place=places[line]) for frame, line in kept],
        )

    def _add_frames(
        self,
        node: _Node,
        against: _Tree | None,
        other: _Node | None,
        depth: int,
        start_ms: float,
        found: list[tuple[FlameFrame, CodeLine]],
    ) -> None:
        """Add the frames of a node's callees to ``found``, ordered by file and line."""
        for line in sorted(node.below, key=lambda line: (line.file, line.line, line.function)):
            below = node.below[line]
            counterpart = other.below.get(line) if other is not None else None
            ms = below.count * self.sample_ms
            if below.count >= _TUNING.least_share * self.root.count and depth < _TUNING.most_levels:
                beyond = None
                if against is not None:
                    beyond = round(ms - (counterpart.count * against.sample_ms if counterpart else 0.0), 4)
                found.append((FlameFrame(0, depth, round(start_ms, 4), round(ms, 4), beyond), line))
                self._add_frames(below, against, counterpart, depth + 1, start_ms, found)
            start_ms += ms


def _tree(samples: Samples, position: int, which: str, numbers: Collection[int]) -> _Tree | None:
    """The samples as a tree of frames; None if there are too few."""
    found = samples_in(samples, position, numbers)
    root = _Node(sum(found.stacks.values()))
    if round(root.count) < _TUNING.fewest_samples:
        return None
    for stack, count in found.stacks.items():
        node = root
        for line in reversed(stack):
            node = node.below.setdefault(line, _Node())
            node.count += count
    return _Tree(samples.ranks[position].log.rank, which, found.steps, found.mean_ms, root)


SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def flame_graphs(
    logs: Sequence[RankLog], telemetry: Mapping[str, HostTelemetry], wanted: Collection[int]
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield each rank with a speedscope document of the ``wanted`` steps (None without samples). Each of ``logs`` must have steps."""
    recorded, _ = exclude_suspended(align_logs(logs)[0], telemetry)
    graph = build_graphs(recorded, []).log if recorded else None
    if graph is None:
        return
    samples, (measured, late) = samples_of(recorded), late_steps(graph)
    for position, log in enumerate(recorded):
        numbers = {step.number for step in log.steps}.intersection(wanted)
        groups = [("all steps", numbers)]
        late_numbers = late[position] & numbers
        if late_numbers and (other_numbers := measured & numbers - late_numbers):
            groups += [("late steps", late_numbers), ("other steps", other_numbers)]
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
        "shared": {"frames": [_frame(line) for line in frames]},
        "profiles": [profile for profile in profiles if profile is not None],
    }


def _frame(line: CodeLine) -> dict[str, Any]:
    name = f"{line.function} ({PurePath(line.file).name}:{line.line})"
    return {"name": name, "file": line.file, "line": line.line}


def _profile(
    samples: Samples, position: int, which: str, numbers: set[int], frames: dict[CodeLine, int]
) -> dict[str, Any] | None:
    """A speedscope profile of some steps, in ms per step: the weights add up to the steps' mean length. Adds new frames to ``frames``
    (frame → index)."""
    found = samples_in(samples, position, numbers)
    count = sum(found.stacks.values())
    if not count:
        return None
    sample_ms = found.mean_ms / count
    weights = {
        tuple(frames.setdefault(line, len(frames)) for line in reversed(stack)): sample_ms * weight
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
