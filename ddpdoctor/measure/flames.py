"""Where a rank's training thread is in its steps, by its stack samples: the slowest rank in the steps in which it comes late, beside
its usual steps and a usual rank.

Of a sample the user's lines are known, from the outermost that was kept to the one at which the thread was, and the innermost line of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.metrics import behind
from ddpdoctor.measure.places import CodeLine
from ddpdoctor.measure.steplog import RankLog, samples_by_step
from ddpdoctor.measure.summary import Flame, FlameFrame, RankSummary

LATE_SHARE = 0.05
"""Of the median step: from there on lateness makes a warning."""


class Tuning(msgspec.Struct, frozen=True):
    """How much of the samples is drawn."""

    fewest: int = 8
    """Samples below which a picture of them is chance."""
    least_share: float = 0.004
    """Of all samples: narrower frames are about two pixels wide."""
    most_frames: int = 160
    """Of one graph, the widest: what keeps a report small."""
    deepest: int = 24
    """Frames above each other; user lines that a sample keeps are fewer."""


_TUNING = Tuning()
_Stack = tuple[int, ...]


class Stacks(msgspec.Struct, frozen=True):
    """The samples of a rank that lie in its steps."""

    frames: list[CodeLine]
    """Each once."""
    by_step: list[tuple[int, list[_Stack]]]
    """Step number and its samples: places in ``frames``, the outermost first."""
    length_ms: dict[int, float]
    """Of every step, be it without samples."""


def stacks_of(log: RankLog) -> Stacks:
    """The samples of a rank by its steps."""
    frames: dict[CodeLine, int] = {}
    known: dict[tuple[int, int], _Stack] = {}

    def stack_of(user: int, innermost: int) -> _Stack:
        if (user, innermost) not in known:
            known[user, innermost] = _stack(log, user, innermost, frames)
        return known[user, innermost]

    by_step = [
        (step.number, [stack for sample in samples if (stack := stack_of(sample[1], sample[2]))])
        for step, samples in samples_by_step(log.samples, log.steps)
    ]
    return Stacks(list(frames), by_step, {step.number: step.length_ns / 1e6 for step in log.steps})


def _stack(log: RankLog, user_line: int, innermost_line: int, frames: dict[CodeLine, int]) -> _Stack:
    """A sample's frames; ``frames`` gets those that are new."""
    user, innermost = log.sample_where.get(user_line), log.sample_where.get(innermost_line)
    if user is None:
        return ()
    places = [*reversed(user.callers), user]
    if innermost is not None and (innermost.file, innermost.line) != (user.file, user.line):
        places.append(innermost)
    lines_of = (CodeLine(place.file, place.line, place.function) for place in places)
    return tuple(frames.setdefault(line, len(frames)) for line in lines_of)


def flames(graph: Graph, logs: Sequence[RankLog], ranks: Sequence[RankSummary]) -> list[Flame]:
    """The slowest rank in its late steps, or in all where that is how it always is; the same rank in its other steps; and a usual rank.
    Fewer where samples, or ranks, are missing. ``logs`` are those of ``graph``."""
    if not any(len(log.samples) for log in logs):
        return []
    late, late_ms = _late_steps(graph), {each.rank: each.late_ms or 0.0 for each in ranks}
    order = sorted(range(len(logs)), key=lambda position: -late_ms.get(logs[position].rank, 0.0))
    slowest, usual = order[0], order[(len(order) + 1) // 2] if len(order) > 1 else None
    stacks = stacks_of(logs[slowest])
    # Steps that are set aside (warm-up, profiled, evaluations) are neither late nor usual.
    measured = {int(number) for group in graph.groups for number in group.steps}
    numbers = set(stacks.length_ms) & measured or set(stacks.length_ms)
    others = numbers - late[slowest]
    drawn: list[_Tree | None] = []
    if late[slowest] and others:
        drawn = [
            _tree(logs[slowest].rank, "late steps", stacks, late[slowest] & numbers),
            _tree(logs[slowest].rank, "other steps", stacks, others),
        ]
    if not all(drawn) or not drawn:
        drawn = [_tree(logs[slowest].rank, "all steps", stacks, numbers)]
    if usual is not None:
        of_usual = stacks_of(logs[usual])
        drawn.append(_tree(logs[usual].rank, "all steps", of_usual, set(of_usual.length_ms) & numbers))
    found = [tree for tree in drawn if tree is not None]
    return [
        tree.flame(against=found[1] if place == 0 and len(found) > 1 else None)
        for place, tree in enumerate(found)
    ]


def _late_steps(graph: Graph) -> list[set[int]]:
    """By position, the steps in which a rank comes later than the median by ``LATE_SHARE`` of the median step."""
    late: list[set[int]] = [set() for _ in graph.ranks]
    if not graph.groups or len(graph.ranks) < 2:
        return late
    least_ns = LATE_SHARE * float(np.median(np.concatenate([group.duration for group in graph.groups])))
    for group in graph.groups:
        by_rank = np.nanmax(np.nan_to_num(behind(group)), axis=1) >= least_ns
        for position, steps in enumerate(late):
            steps.update(group.steps[by_rank[:, position]].tolist())
    return late


class _Node(msgspec.Struct):
    """A frame below the same callers."""

    count: int = 0
    below: dict[CodeLine, _Node] = msgspec.field(default_factory=dict)


class _Tree(msgspec.Struct, frozen=True):
    """All samples of some steps of a rank."""

    rank: int
    which: str
    steps: int
    mean_ms: float
    root: _Node

    @property
    def each_ms(self) -> float:
        """What a sample stands for."""
        return self.mean_ms / self.root.count

    def flame(self, against: _Tree | None) -> Flame:
        """The frames to draw; ``against``: those of which each says how much longer it is."""
        found: list[tuple[FlameFrame, CodeLine]] = []
        self._lay(self.root, against, against.root if against else None, 0, 0.0, found)
        kept = sorted(found, key=lambda pair: -pair[0].ms)[: _TUNING.most_frames]
        kept.sort(key=lambda pair: (pair[0].depth, pair[0].start_ms))
        places = {line: place for place, line in enumerate(dict.fromkeys(line for _, line in kept))}
        return Flame(
            rank=self.rank,
            which=self.which,
            steps=self.steps,
            samples=self.root.count,
            mean_ms=round(self.mean_ms, 4),
            against=None if against is None else f"rank {against.rank}, {against.which}",
            places=list(places),
            frames=[msgspec.structs.replace(frame, place=places[line]) for frame, line in kept],
        )

    def _lay(
        self,
        node: _Node,
        against: _Tree | None,
        other: _Node | None,
        depth: int,
        start_ms: float,
        found: list[tuple[FlameFrame, CodeLine]],
    ) -> None:
        """Frames of a node's callees, in the order of the program's text."""
        for line in sorted(node.below, key=lambda line: (line.file, line.line, line.function)):
            below = node.below[line]
            its = other.below.get(line) if other is not None else None
            ms = below.count * self.each_ms
            if below.count >= _TUNING.least_share * self.root.count and depth < _TUNING.deepest:
                beyond = None
                if against is not None:
                    beyond = round(ms - (its.count * against.each_ms if its else 0.0), 4)
                found.append((FlameFrame(0, depth, round(start_ms, 4), round(ms, 4), beyond), line))
                self._lay(below, against, its, depth + 1, start_ms, found)
            start_ms += ms


def _tree(rank: int, which: str, stacks: Stacks, numbers: set[int]) -> _Tree | None:
    """None of too few samples."""
    counts = Counter(stack for number, samples in stacks.by_step if number in numbers for stack in samples)
    root = _Node(counts.total())
    if root.count < _TUNING.fewest:
        return None
    for stack, count in counts.items():
        node = root
        for place in stack:
            node = node.below.setdefault(stacks.frames[place], _Node())
            node.count += count
    mean_ms = sum(stacks.length_ms[number] for number in numbers) / len(numbers)
    return _Tree(rank, which, len(numbers), mean_ms, root)
