"""Ranks source lines by weight and adds their callers; also :class:`SourceLines`, the common interface of logs and windows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from ddpdoctor.measure.numerics import Ints
from ddpdoctor.measure.places import CodeLine, Stack, Where, loop_in
from ddpdoctor.measure.taxonomy import Component, SyncKind

from .gaps import MainGap

MOST_LINES = 3
"""Most lines reported for one cause."""


class _Tuning(msgspec.Struct, frozen=True):
    mostly: float = 0.5
    """Callers of a recorded call, which has no callers itself, are reported if more than this share of the samples at its line have
    the same ones."""
    notable: float = 0.25
    """Other callers of a line are counted if they weigh at least this share of the heaviest ones; a smaller weight may be
    stray samples or counting errors."""
    stray: float = 0.02
    """Share of a path's samples that other ranks may have there although they do not take it."""


_TUNING = _Tuning()
_MOST_FRAMES = 9
"""User frames of a stack that the hook records (hook/job/source_lines.py: the innermost and 8 callers)."""
_NO_STACKS: Mapping[Stack, float] = {}


def ranked(weights: Mapping[CodeLine, float]) -> list[Where]:
    """The heaviest lines, the heaviest first, each with its share of the total weight."""
    total = sum(weights.values())
    most = sorted(weights.items(), key=lambda item: -item[1])[:MOST_LINES]
    return [
        Where(line.file, line.line, line.function, share=weight / total if total else None)
        for line, weight in most
    ]


def joined(first: list[Where], others: list[Where]) -> list[Where]:
    """The ``first`` lines, then the ``others`` that are not among them; at most ``MOST_LINES``."""
    known = {(where.file, where.line) for where in first}
    return [*first, *(where for where in others if (where.file, where.line) not in known)][:MOST_LINES]


def chosen_and_others(positions: Sequence[int] | None, count: int) -> tuple[Sequence[int], Sequence[int]]:
    """(``positions``, or all of ``count`` if None; the other positions)."""
    if positions is None:
        return range(count), ()
    return positions, sorted(set(range(count)).difference(positions))


def distinguishing_callers(callers: Stack, others: Iterable[Stack]) -> Stack:
    """The shortest non-empty prefix of ``callers`` that no different stack of ``others`` has."""
    rest = [other for other in others if other != callers]
    for length in range(1, len(callers)):
        rest = [other for other in rest if other[:length] == callers[:length]]
        if not rest:
            return callers[:length]
    return callers


def heaviest_callers(weights: Mapping[Stack, float], others: Iterable[Stack] = ()) -> tuple[Stack, int]:
    """(heaviest callers, number of other notable callers). The callers are cut to what distinguishes them from the rest and from
    ``others``, but include the framework's loop that calls the first of them."""
    if not weights:
        return (), 0
    whole = max(weights, key=lambda callers: weights[callers])
    heaviest = distinguishing_callers(whole, [*weights, *others])
    loop = loop_in([line.file for line in whole])
    if loop is not None:
        heaviest = whole[: max(len(heaviest), loop + 1)]
    by_prefix: defaultdict[Stack, float] = defaultdict(float)
    for callers, weight in weights.items():
        by_prefix[callers[: len(heaviest)]] += weight
    least = _TUNING.notable * by_prefix.pop(heaviest)
    return heaviest, sum(weight >= least for weight in by_prefix.values())


def usual_callers(line: CodeLine, stacks: Mapping[Stack, float]) -> tuple[Stack, int]:
    """(callers of a line in most samples, number of other notable callers). The line may be anywhere in the stack. No callers
    if none has more than half of the weight."""
    weights: defaultdict[Stack, float] = defaultdict(float)
    for stack, count in stacks.items():
        for place, each in enumerate(stack):
            if each == line:
                weights[stack[place + 1 :]] += count
    if not weights or max(weights.values()) <= _TUNING.mostly * sum(weights.values()):
        return (), 0
    return heaviest_callers(weights)


def by_line(stacks: Mapping[Stack, float]) -> dict[CodeLine, float]:
    """Weight of each line, over all of its callers."""
    lines: defaultdict[CodeLine, float] = defaultdict(float)
    for stack, weight in stacks.items():
        lines[stack[0]] += weight
    return lines


def with_heaviest(
    places: Sequence[Where],
    stacks: Mapping[Stack, float],
    others: Mapping[Stack, float] = _NO_STACKS,
    scale: float = 0.0,
    hooks: bool = False,
) -> list[Where]:
    """The lines, each with its heaviest callers by weight in ``stacks`` minus ``scale`` times that in ``others``. If the others also run
    the first line, its caller from :func:`_diverging_caller` precedes it; otherwise, with ``hooks``, the line in the user's function that a
    framework's loop calls."""
    net = {stack: weight - scale * others.get(stack, 0.0) for stack, weight in stacks.items()}
    found = []
    for where in places:
        line = where.stack[0]
        weights = {stack[1:]: weight for stack, weight in net.items() if stack[0] == line}
        callers = heaviest_callers(weights, (stack[1:] for stack in others if stack[0] == line))
        found.append(where.called_from(*callers))
    leading = [
        _diverging_caller(where, net, stacks, others, scale) or (_hook_line(where) if hooks else None)
        for where in found[:1]
    ]
    return joined([where for where in leading if where is not None], found)


def _hook_line(where: Where) -> Where | None:
    """The line in the user's hook from which ``where`` is called; None if it is the line itself or no framework calls it."""
    loop = loop_in([line.file for line in where.callers])
    if not loop:
        return None
    hook = where.callers[loop - 1]
    return Where(hook.file, hook.line, hook.function, share=where.share, callers=where.callers[loop:])


def _diverging_caller(
    where: Where,
    net: Mapping[Stack, float],
    stacks: Mapping[Stack, float],
    others: Mapping[Stack, float],
    scale: float,
) -> Where | None:
    """The outermost caller on the path to a line that is on none of the other ranks' paths to it; None if there is none, or if the
    others do not run the line. ``net``: the ``stacks`` minus ``scale`` times the ``others``."""
    line = where.stack[0]
    run_by_others = scale * sum(weight for stack, weight in others.items() if stack[0] == line)
    own = {stack: weight for stack, weight in net.items() if stack[0] == line}
    if not own or run_by_others <= _TUNING.stray * sum(stacks[stack] for stack in own):
        return None
    heaviest = max(own, key=lambda stack: own[stack])
    own_weights, other_weights = (
        _shared_path_weights(heaviest, stacks),
        _shared_path_weights(heaviest, others),
    )
    places = range(1, len(heaviest))
    unshared = [
        place
        for place in places
        if scale * sum(other_weights[: place + 1]) <= _TUNING.stray * sum(own_weights[: place + 1])
    ]
    if not unshared or (
        unshared[-1] == places[-1] and scale * other_weights[-1] > _TUNING.stray * sum(own_weights[:-2])
    ):
        return None
    caller, callers = heaviest[unshared[-1]], heaviest[unshared[-1] + 1 :]
    return Where(caller.file, caller.line, caller.function, share=where.share, callers=callers[:1])


def _shared_path_weights(path: Stack, stacks: Mapping[Stack, float]) -> list[float]:
    """[len(path) + 2] weights of the ``stacks`` by the innermost place of ``path`` from which on outwards they have the same calls. The
    last two are of stacks that share none, and of those for which this is unknown because outer calls were not recorded."""
    weights = [0.0] * (len(path) + 2)
    for stack, weight in stacks.items():
        joins = (
            place
            for place, line in enumerate(path)
            for other, each in enumerate(stack)
            if each == line
            and _same_calls(path[place:], stack[other:], _may_be_cut(path), _may_be_cut(stack))
        )
        weights[next(joins, len(path) + _may_be_cut(stack))] += weight
    return weights


def _may_be_cut(stack: Stack) -> bool:
    """Whether outer calls may be missing."""
    return len(stack) >= _MOST_FRAMES


def _same_calls(path: Stack, other: Stack, path_is_cut: bool, other_is_cut: bool) -> bool:
    """Whether both are equal as far as both were recorded."""
    if len(path) < len(other):
        return path_is_cut and other[: len(path)] == path
    return path[: len(other)] == other and (other_is_cut or len(path) == len(other))


class SourceLines(Protocol):
    """Interface for the source lines of a recording."""

    def work(
        self,
        components: Sequence[Component],
        positions: Sequence[int] | None,
        steps: Ints,
        fallback_steps: Ints | None = None,
    ) -> list[Where]:
        """Lines of this kind of work on these ranks (None: all) in these steps, most time first; if there are too few samples, in the
        steps ``fallback_steps``."""

    def syncs(self, kinds: Sequence[SyncKind]) -> list[Where]:
        """Lines that call synchronisations of these kinds, or wait in them for a device that then idles, heaviest first."""

    def operation(
        self, components: Sequence[Component | SyncKind], positions: Sequence[int] | None
    ) -> str | None:
        """Name of the annotation or operator of this work; for a kind of synchronisation, of the call that waits. None if unknown,
        as in step logs."""
        return None

    def operators(self, components: Sequence[Component]) -> list[str]:
        """The torch operators that run on the hosts for at least a tenth of this kind of work, the longest first; [] if there are none or
        operators were not recorded."""
        return []

    def gap(
        self, components: Sequence[Component], positions: Sequence[int] | None, steps: Ints
    ) -> str | None:
        """The gap between phases with most of this kind of work, in words; None if it is in no gap."""
        found = self.main_gap(components, positions, steps)
        return None if found is None else found.words

    def main_gap(
        self, components: Sequence[Component], positions: Sequence[int] | None, steps: Ints
    ) -> MainGap | None:
        """The gap between phases with most of this kind of work of the host or its device; None if it is in no gap."""

    def common_share(self, components: Sequence[Component], steps: Ints) -> float | None:
        """Share (0 to 1) of the ranks' common work of this kind in these steps that is at the same lines; None if unknown,
        as in windows of a few steps."""
        return None
