"""The user's source lines behind the measurements of a step log: from the calls that were recorded, and from
stack samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec

from ddpdoctor.measure.numerics import Intervals, Ints
from ddpdoctor.measure.phases import Gap
from ddpdoctor.measure.places import Where
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.taxonomy import Component, SyncKind

from .callers import Path, paths_in, with_callers
from .gaps import MainGap, RankGaps, free_gaps, gaps_of_log, lies_in_gaps, main_gap
from .holding import Holders
from .ranking import MOST_LINES, Frame, frame_of, joined, ranked
from .samples import SampleCounts, Samples, beyond, callers_of, common_of, counted, same_lines, scale_of
from .taken import kinds_of

_FEWEST_SAMPLES = 3
"""Samples below which a line may be there by chance."""
_ENOUGH_SAMPLES = 8
"""Samples of a line from which its time is stated: the counting error is then a third of it."""


class LogSourceLines:
    """Implements :class:`.ranking.SourceLines` for step logs.

    ``python_parts``, by position and line, says which part of the samples of host work is Python and not an operator,
    see :func:`ddpdoctor.measure.graph.python_parts`.
    """

    def __init__(
        self, logs: Sequence[RankLog], python_parts: Sequence[Mapping[int, float]] | None = None
    ) -> None:
        self.logs = logs
        parts = python_parts or [{}] * len(logs)
        self._free_gaps: dict[int, Mapping[Gap, Intervals]] = {}
        self._python_parts = {log.rank: of_rank for log, of_rank in zip(logs, parts, strict=True)}

    @cached_property
    def _paths(self) -> dict[Frame, Counter[Path]]:
        return paths_in(self.logs)

    @cached_property
    def _holders(self) -> Holders:
        return Holders(self.logs)

    @cached_property
    def _samples(self) -> dict[int, Samples]:
        return {log.rank: Samples(log, self._holders) for log in self.logs}

    def syncs(self, kinds: Sequence[SyncKind]) -> list[Where]:
        """Lines that call synchronisations of these kinds."""
        calls: Counter[Frame] = Counter()
        for log in self.logs:
            for point in log.sync_points:
                where = log.where.get(point.where)
                if point.kind in kinds and where is not None:
                    calls[frame_of(where)] += 1
        return with_callers(ranked(calls), self._paths)

    def operation(
        self, components: Sequence[Component | SyncKind], positions: Sequence[int] | None
    ) -> str | None:
        """A step log knows no kernels."""
        return None

    def work(
        self,
        components: Sequence[Component],
        positions: Sequence[int] | None,
        steps: Ints,
        or_else: Ints | None = None,
    ) -> list[Where]:
        """Lines of this kind of work: sampled ones where there are enough samples, else the recorded call's."""
        wanted = {int(step) for step in steps}
        chosen, others = self._chosen_and_others(positions)
        called = with_callers(_called(chosen, components, wanted), self._paths)
        sampled = self._sampled(chosen, others, components, wanted)
        if not sampled and or_else is not None:
            sampled = self._sampled(chosen, others, components, {int(step) for step in or_else})
        return joined(sampled, called) if sampled else called[:MOST_LINES]

    def gap(
        self, components: Sequence[Component], positions: Sequence[int] | None, steps: Ints
    ) -> str | None:
        """Of what no event of the log covers."""
        chosen, others = self._chosen_and_others(positions)
        found = self._main_gap(chosen, others, components, {int(step) for step in steps})
        return None if found is None else found.words

    def in_common(self, components: Sequence[Component], steps: Ints) -> float | None:
        """By the samples of each rank; None where one has too few."""
        wanted = {int(step) for step in steps}
        each = [self._counted([log], components, wanted, None) for log in self.logs]
        if min((counts.samples for counts in each), default=0) < _ENOUGH_SAMPLES:
            return None
        return same_lines(each)

    def _chosen_and_others(self, positions: Sequence[int] | None) -> tuple[list[RankLog], list[RankLog]]:
        if positions is None:
            return list(self.logs), []
        others = [log for position, log in enumerate(self.logs) if position not in positions]
        return [self.logs[position] for position in positions], others

    def _main_gap(
        self,
        logs: Sequence[RankLog],
        others: Sequence[RankLog],
        components: Sequence[Component],
        wanted: set[int],
    ) -> MainGap | None:
        if not lies_in_gaps(components):
            return None
        own, theirs = ([self._gaps_of(log, wanted) for log in of_these] for of_these in (logs, others))
        return main_gap(own, theirs, components)

    def _gaps_of(self, log: RankLog, wanted: set[int]) -> RankGaps:
        if log.rank not in self._free_gaps:
            self._free_gaps[log.rank] = free_gaps(log)
        return gaps_of_log(log, self._free_gaps[log.rank], wanted)

    def _sampled(
        self,
        logs: Sequence[RankLog],
        others: Sequence[RankLog],
        components: Sequence[Component],
        wanted: set[int],
    ) -> list[Where]:
        """Most sampled lines, in samples per second of steps, less what the other ranks show at the same line."""
        found = self._main_gap(logs, others, components, wanted)
        gap = None if found is None else found.gap
        mine = self._counted(logs, components, wanted, gap)
        if Component.HOST in components and not others:
            mine = common_of(mine, [self._counted([log], components, wanted, gap) for log in logs])
        theirs = self._counted(others, components, wanted, gap)
        return [
            msgspec.structs.replace(
                where.called_from(*callers_of(frame_of(where), mine, theirs)),
                python_ms=_python_ms(mine, theirs, frame_of(where)),
            )
            for where in ranked(beyond(mine, theirs, _FEWEST_SAMPLES))
        ]

    def _counted(
        self, logs: Sequence[RankLog], components: Sequence[Component], wanted: set[int], gap: Gap | None
    ) -> SampleCounts:
        ranks = [(log, self._samples[log.rank]) for log in logs]
        return counted(ranks, components, wanted, self._python_parts, self._holders, gap)


def _called(logs: Sequence[RankLog], components: Sequence[Component], wanted: set[int]) -> list[Where]:
    """Lines of the recorded calls that are this kind of work, by time."""
    kinds = kinds_of(components)
    calls: Counter[Frame] = Counter()
    for log in logs if kinds else ():
        by_line: Counter[int] = Counter()
        for step in log.steps:
            if step.number in wanted:
                for event in step.events:
                    if event.kind in kinds:
                        by_line[event.where] += max(event.duration_ns, 1)
        for line, spent_ns in by_line.items():
            if (where := log.where.get(line)) is not None:
                calls[frame_of(where)] += spent_ns
    return ranked(calls)


def _python_ms(mine: SampleCounts, theirs: SampleCounts, frame: Frame) -> float | None:
    """Milliseconds per step at a line outside torch, beyond those of the other ranks; None with too few samples."""
    count = mine.outside.get(frame, 0.0) - scale_of(mine, theirs) * theirs.outside.get(frame, 0.0)
    if count < _ENOUGH_SAMPLES or not mine.steps:
        return None
    return 1e3 * mine.seconds / mine.steps * count / mine.taken
