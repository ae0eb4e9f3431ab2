"""Who called the user's lines: by stacks, each with its weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ddpdoctor.measure.places import CodeLine, Stack, Where


class _Tuning(msgspec.Struct, frozen=True):
    mostly: float = 0.5
    """A recorded call names its line and not its callers: they are told where more than this part of the samples that know
    that line came the same way."""
    notable: float = 0.25
    """A helper that is called from several places spends time for each of them; other callers of a line count beside those that
    weigh most if they weigh this part of that: fewer are stray samples, and what counting errors leave of other ranks' callers."""


_TUNING = _Tuning()
_NONE: Mapping[Stack, float] = {}


def distinct(callers: Stack, others: Iterable[Stack]) -> Stack:
    """As many of the callers as tell them from the ``others``; one at least, where there is any."""
    rest = [other for other in others if other != callers]
    for length in range(1, len(callers)):
        rest = [other for other in rest if other[:length] == callers[:length]]
        if not rest:
            return callers[:length]
    return callers


def heaviest_of(weights: Mapping[Stack, float], others: Iterable[Stack] = ()) -> tuple[Stack, int]:
    """The callers of most weight, so far as it tells them from the rest and from ``others``; how many of the rest are notable, too."""
    if not weights:
        return (), 0
    heaviest = distinct(max(weights, key=lambda callers: weights[callers]), [*weights, *others])
    alike: defaultdict[Stack, float] = defaultdict(float)
    for callers, weight in weights.items():
        alike[callers[: len(heaviest)]] += weight
    least = _TUNING.notable * alike.pop(heaviest)
    return heaviest, sum(weight >= least for weight in alike.values())


def usual(line: CodeLine, stacks: Mapping[Stack, float]) -> tuple[Stack, int]:
    """The callers by which most samples came to a line, whether they ended there or deeper, and how many others there are; none where
    they came by many."""
    weights: defaultdict[Stack, float] = defaultdict(float)
    for stack, count in stacks.items():
        for place, each in enumerate(stack):
            if each == line:
                weights[stack[place + 1 :]] += count
    if not weights or max(weights.values()) <= _TUNING.mostly * sum(weights.values()):
        return (), 0
    return heaviest_of(weights)


def by_line(stacks: Mapping[Stack, float]) -> dict[CodeLine, float]:
    """What weighs on each line, whatever called it."""
    lines: defaultdict[CodeLine, float] = defaultdict(float)
    for stack, weight in stacks.items():
        lines[stack[0]] += weight
    return lines


def with_heaviest(
    places: Sequence[Where],
    stacks: Mapping[Stack, float],
    others: Mapping[Stack, float] = _NONE,
    scale: float = 0.0,
) -> list[Where]:
    """The same lines, each with the callers that weigh most in ``stacks``, beyond ``others`` multiplied by ``scale``."""

    def callers_of(line: CodeLine) -> tuple[Stack, int]:
        weights = {
            stack[1:]: weight - scale * others.get(stack, 0.0)
            for stack, weight in stacks.items()
            if stack[0] == line
        }
        return heaviest_of(weights, (stack[1:] for stack in others if stack[0] == line))

    return [where.called_from(*callers_of(where.stack[0])) for where in places]
