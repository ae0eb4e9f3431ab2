"""Source lines from step logs: recorded calls and stack samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array, Ints
from ddpdoctor.measure.phases import Gap
from ddpdoctor.measure.places import CodeLine, Stack, Where
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.taxonomy import BETWEEN_PHASES, Component, SyncKind

from .counts import SampleCounts, common_counts, count_samples, excess_samples, same_lines, scale_of
from .gaps import MainGap, free_gaps, gaps_of_log, lies_in_gaps, lies_outside, main_gap
from .ranking import MOST_LINES, SourceLines, chosen_and_others, joined, ranked, usual_callers, with_heaviest
from .table import Samples, kinds_of, samples_of

_FEWEST_SAMPLES = 3
"""Fewest samples of a reported line; fewer may be random."""
_ENOUGH_SAMPLES = 8
"""Samples of a line from which its time is reported: the counting error is then a third of it."""


_CALLS_FORWARD = 0.1
"""A line calls the forward pass if at least this share of its samples is in one; a smaller share may be due to errors of sample times."""
_IN_FORWARD = 0.02
"""A forward pass runs a line if at least this share of its samples is in one."""


class LogSourceLines(SourceLines):
    """Source lines from step logs.

    ``python_parts``, by index of the log and line: Python's share (without operators) of the samples of host work,
    see :func:`ddpdoctor.measure.graph.python_parts`.
    """

    def __init__(
        self, logs: Sequence[RankLog], python_parts: Sequence[Mapping[tuple[str, int], float]] | None = None
    ) -> None:
        self.logs = logs
        self._free_gaps = cache(lambda position: free_gaps(logs[position]))
        self._python_parts = python_parts or [{}] * len(logs)

    @cached_property
    def samples(self) -> Samples:
        """Stack samples of the logs."""
        return samples_of(self.logs)

    @cached_property
    def _python(self) -> list[Array | float]:
        """By index of the log and stack, Python's share of the samples."""
        lines = [(stack.lines[0].file, stack.lines[0].line) for stack in self.samples.stacks]
        return [
            np.array([parts.get(line, 1.0) for line in lines]) if parts else 1.0
            for parts in self._python_parts
        ]

    def _weights(self, during: Sequence[Component] = ()) -> Array:
        """[K] weights of all ranks' samples, without bursts, by stack; only of those ``during`` these components, if any are given."""
        samples = self.samples
        each = (
            samples.weights(position, rank.while_doing(during) if during else slice(None)).without_bursts
            for position, rank in enumerate(samples.ranks)
        )
        return sum(each, np.zeros(len(samples.stacks)))

    @cached_property
    def _usual(self) -> Callable[[CodeLine], tuple[Stack, int]]:
        """The main callers of a line, from the samples of all ranks."""
        stacks = self.samples.by_stack(self._weights())
        return cache(lambda line: usual_callers(line, stacks))

    @cached_property
    def _training_calls(self) -> frozenset[CodeLine]:
        """Lines that call a forward or backward pass or the optimizer, from recorded calls and from samples in a forward pass. Host work
        sampled there is mostly torch's own, before and after the pass."""
        return self._forward_lines[0].union(self._step_calls)

    @cached_property
    def _forward_lines(self) -> tuple[frozenset[CodeLine], frozenset[CodeLine]]:
        """(lines that call a forward pass, all lines that call one or run in one)."""
        calling, inside, every = Counter[CodeLine](), Counter[CodeLine](), Counter[CodeLine]()
        weights = self._weights()
        in_forward = self._weights([Component.FORWARD])
        for stack, weight, part in zip(
            self.samples.stacks, weights.tolist(), in_forward.tolist(), strict=True
        ):
            every.update(dict.fromkeys(stack.lines, weight))
            inside.update(dict.fromkeys(stack.lines, part))
            calling.update(dict.fromkeys(stack.lines[0 if stack.in_torch else 1 :], part))
        return (
            frozenset(
                line for line, part in calling.items() if part >= max(_CALLS_FORWARD * every[line], 1.0)
            ),
            frozenset(line for line, part in inside.items() if part >= max(_IN_FORWARD * every[line], 2.0)),
        )

    def _without_forward_lines(self, stack: Stack) -> Stack:
        """The stack without its innermost lines that a forward pass also runs. If a model is called outside the forward pass of
        training, the caller is reported, not the line of the model."""
        running = self._forward_lines[1]
        rest = stack[next((place for place, line in enumerate(stack) if line not in running), len(stack)) :]
        return rest if rest and rest[0] not in self._training_calls else stack

    @cached_property
    def _loop_functions(self) -> frozenset[tuple[str, str]]:
        """(file, function) of the code that takes batches from the training loaders."""
        taking = {
            log.where[event.where].stack[0]
            for log in self.logs
            for step in log.steps
            for event in step.events
            if event.gives_batch and event.loader in log.main_loaders and event.where in log.where
        }
        return frozenset((line.file, line.function) for line in taking)

    def _without_loop_callers(self, found: list[Where]) -> list[Where]:
        """The lines, with callers only up to the function that contains the training loop, if it is among them."""
        inside = []
        for where in found:
            loop = (
                place
                for place, line in enumerate(where.stack)
                if (line.file, line.function) in self._loop_functions
            )
            callers = where.callers[: next(loop, None)]
            path = (where, *callers)
            calls_step = (
                place
                for place, line in enumerate(path[:-1])
                if (line.file, line.function) in self._step_functions
            )
            step_callers = len(callers) - next(calls_step, len(callers))
            inside.append(msgspec.structs.replace(where, callers=callers, step_callers=step_callers))
        return inside

    @cached_property
    def _step_functions(self) -> frozenset[tuple[str, str]]:
        """(file, function) of the calls of the backward pass and the optimizer, and of all callers of these functions."""
        calling = {(line.file, line.function) for line in self._step_calls}
        found = set(calling)
        for stack in self.samples.stacks:
            functions = [(line.file, line.function) for line in stack.lines]
            first = next(
                (place for place, function in enumerate(functions) if function in calling), len(functions)
            )
            found.update(functions[first:])
        return frozenset(found)

    @cached_property
    def _step_calls(self) -> Mapping[CodeLine, float]:
        """ns in recorded calls of the backward pass and the optimizer, by line."""
        return _calls(self.logs, [Component.BACKWARD, Component.OPTIMIZER], None)

    def _with_framework_calls(self, found: list[Where], components: Sequence[Component]) -> list[Where]:
        """The lines that save or load, each with the framework functions through which it does."""
        if Component.CHECKPOINT not in components:
            return found
        kinds = kinds_of(components)
        events = (
            (log, event)
            for log in self.logs
            for step in log.steps
            for event in step.events
            if event.kind in kinds
        )
        lines = (log.where.get(event.where) for log, event in events)
        ways = {line.stack[0]: line.through for line in lines if line is not None}
        return [msgspec.structs.replace(where, through=ways.get(where.stack[0], ())) for where in found]

    def _call_lines(self, calls: Mapping[CodeLine, float]) -> list[Where]:
        """The heaviest lines by number of recorded calls, or time in them, each with its main callers."""
        return [where.called_from(*self._usual(where.stack[0])) for where in ranked(calls)]

    def syncs(self, kinds: Sequence[SyncKind]) -> list[Where]:
        """Lines that call synchronisations of these kinds. A line is listed once for each path through framework functions."""
        calls: Counter[tuple[CodeLine, tuple[tuple[str, str], ...]]] = Counter()
        ways: dict[tuple[tuple[str, str], ...], Stack] = {}
        for log in self.logs:
            for point in log.sync_points:
                where = log.where.get(point.where)
                if point.kind in kinds and where is not None:
                    way = tuple((frame.file, frame.function) for frame in where.through)
                    ways.setdefault(way, where.through)
                    calls[where.stack[0], way] += 1
        total = sum(calls.values())
        return [
            Where(line.file, line.line, line.function, share=count / total, through=ways[way]).called_from(
                *self._usual(line)
            )
            for (line, way), count in calls.most_common(MOST_LINES)
        ]

    def work(
        self,
        components: Sequence[Component],
        positions: Sequence[int] | None,
        steps: Ints,
        fallback_steps: Ints | None = None,
    ) -> list[Where]:
        """Lines of this kind of work: sampled lines if there are enough samples, then those of recorded calls."""
        chosen, _ = chosen_and_others(positions, len(self.logs))
        wanted = {int(step) for step in steps}
        calls = _calls([self.logs[position] for position in chosen], components, wanted)
        sampled = self._sampled_lines(components, positions, steps)
        if not sampled and fallback_steps is not None:
            sampled = self._sampled_lines(components, positions, fallback_steps)
        return self._with_framework_calls(
            self._without_loop_callers(joined(sampled, self._call_lines(calls))), components
        )

    def excess_lines(
        self, components: Sequence[Component], positions: Sequence[int], steps: set[int], others: set[int]
    ) -> list[Where]:
        """Lines of this kind of work with more samples in ``steps`` than in ``others`` on the ranks at these indices, then those of
        recorded calls."""
        selected, reference = (self._count(positions, components, chosen, None) for chosen in (steps, others))
        places = ranked(excess_samples(selected, reference, _FEWEST_SAMPLES))
        hooks = Component.HOST in components or lies_outside(components)
        scale = scale_of(selected, reference)
        sampled = with_heaviest(places, selected.stacks, reference.stacks, scale, hooks)
        calls = _calls([self.logs[place] for place in positions], components, steps)
        return self._with_framework_calls(
            self._without_loop_callers(joined(sampled, self._call_lines(calls))), components
        )

    def common_share(self, components: Sequence[Component], steps: Ints) -> float | None:
        """See :meth:`.SourceLines.common_share`. From the samples of each rank; None if any rank has too few."""
        wanted = {int(step) for step in steps}
        each = [self._count([position], components, wanted, None) for position in range(len(self.logs))]
        if min((counts.samples for counts in each), default=0) < _ENOUGH_SAMPLES:
            return None
        return same_lines(each)

    def main_gap(
        self, components: Sequence[Component], positions: Sequence[int] | None, steps: Ints
    ) -> MainGap | None:
        """The main gap of work that no event of the log covers."""
        if not lies_in_gaps(components):
            return None
        wanted = {int(step) for step in steps}
        own, reference = (
            [gaps_of_log(self.logs[position], self._free_gaps(position), wanted) for position in some]
            for some in chosen_and_others(positions, len(self.logs))
        )
        return main_gap(own, reference, components)

    def _sampled_lines(
        self, components: Sequence[Component], positions: Sequence[int] | None, steps: Ints
    ) -> list[Where]:
        """Lines with the most samples per second of steps, minus those of the other ranks at the same line."""
        chosen, others = chosen_and_others(positions, len(self.logs))
        wanted = {int(step) for step in steps}
        main = self.main_gap(components, positions, steps)
        gaps = [None if main is None else main.gap]
        if others and gaps != [None]:
            gaps.append(None)  # another rank may do more of other work in the gap in which these do theirs
        for gap in gaps:
            selected, reference = (self._count(some, components, wanted, gap) for some in (chosen, others))
            if Component.HOST in components and not others:
                each = [self._count([position], components, wanted, gap) for position in chosen]
                selected = common_counts(selected, each)
            places = ranked(excess_samples(selected, reference, _FEWEST_SAMPLES))
            if places:
                break
        training = self._training_calls if Component.HOST in components else frozenset[CodeLine]()
        elsewhere = [each for each in places if each.stack[0] not in training]
        on_device = any(log.on_device_time for log in self.logs)
        places = elsewhere if elsewhere or on_device else places
        scale, hooks = scale_of(selected, reference), lies_outside(components)
        found = []
        for where in with_heaviest(places, selected.stacks, reference.stacks, scale, hooks):
            line = where.stack[0]
            count = sum(n for stack, n in selected.stacks.items() if line in stack)
            of_others = scale * _samples_on_path(reference.stacks, where.stack)
            of_these = _samples_on_path(selected.stacks, where.stack)
            found.append(
                msgspec.structs.replace(
                    where,
                    samples=round(count),
                    others_share=of_others / of_these if scale and of_these else None,
                    python_ms=None if line in training else _python_ms(selected, reference, line),
                    follows=selected.followers.get(line, 0.0) > selected.at.get(line, 0.0),
                )
            )
        return found

    def _count(
        self, positions: Sequence[int], components: Sequence[Component], wanted: set[int], gap: Gap | None
    ) -> SampleCounts:
        # Python's share of a line's samples is known for host work, but not for work in the gaps.
        only_python = Component.HOST in components and set(components).isdisjoint(BETWEEN_PHASES)
        parts = self._python if only_python else [1.0] * len(self.logs)
        on_host = Component.HOST in components and not any(log.on_device_time for log in self.logs)
        trim = self._without_forward_lines if on_host else None
        return count_samples(self.samples, positions, components, wanted, parts, gap, trim)


def _calls(
    logs: Sequence[RankLog], components: Sequence[Component], wanted: set[int] | None
) -> Mapping[CodeLine, float]:
    """ns in recorded calls of this kind of work, by line. ``wanted``: only in these steps."""
    kinds = kinds_of(components)
    calls: Counter[CodeLine] = Counter()
    for log in logs if kinds else ():
        by_line: Counter[int] = Counter()
        for step in log.steps:
            if wanted is None or step.number in wanted:
                for event in step.events:
                    if event.kind in kinds:
                        by_line[event.where] += max(event.duration_ns, 1)
        for line, spent_ns in by_line.items():
            if (where := log.where.get(line)) is not None:
                calls[where.stack[0]] += spent_ns
    return calls


def _samples_on_path(stacks: Mapping[Stack, float], path: Stack) -> float:
    """Samples of the ``stacks`` that contain this line with these callers."""
    return sum(
        weight
        for stack, weight in stacks.items()
        if path[0] in stack and stack[stack.index(path[0]) :][: len(path)] == path
    )


def _python_ms(selected: SampleCounts, reference: SampleCounts, line: CodeLine) -> float | None:
    """ms per step at a line outside torch, in excess of the other ranks; None if there are too few samples."""
    count = selected.outside.get(line, 0.0) - scale_of(selected, reference) * reference.outside.get(line, 0.0)
    if count < _ENOUGH_SAMPLES or not selected.steps:
        return None
    return 1e3 * selected.seconds / selected.steps * count / selected.any_work
