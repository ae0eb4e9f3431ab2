"""What is known of stragglers once all ranks have been compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.taxonomy import INDEX, Component, LateCause


class Attribution(msgspec.Struct, frozen=True):
    """Excess work per group of the graph, each [N, K, R, C] ns, zero where no rank is late."""

    excess: list[Array]
    """What makes the stragglers late: no more in a cycle than they do longer in all."""
    claimed: list[Array]
    """What they do longer in each component, though they may make up for it in another."""
    stragglers: dict[LateCause, list[int]]
    """Positions of the stragglers by kind of work, those with most excess first."""
    by_chance: tuple[LateCause, ...] = ()
    """Kinds of recorded work that take long now on this rank, now on that one, as chance has it."""
    in_turn: list[Array] = msgspec.field(default_factory=list)
    """Like ``excess``: what makes now this rank late, now that one, where no rank alone straggles with that kind of work.
    Empty where there is none."""
    causes_in_turn: tuple[LateCause, ...] = ()
    """Kinds of work of ``in_turn``."""
    rotates: bool = False
    """Whether the step number tells whose turn it is."""
    stands_out_in: dict[LateCause, list[int]] = msgspec.field(default_factory=dict)
    """Steps, by kind of work, that make a rank a straggler for no more than standing out of a short window (:mod:`.standout`)."""
    short: bool = False
    """A window on devices is all that is known of the job."""
    starved: list[Array] = msgspec.field(default_factory=list)
    """Like ``excess``, and no part of it: what ranks wait for cores beyond their due (:mod:`.starved`). Empty where none does."""
    inputs_explain: float | None = None
    """Part of the differences of the ranks' computation that their inputs' sizes explain (:mod:`.levels`)."""


def component(amounts: Iterable[Array], components: Sequence[Component]) -> list[Array]:
    """[N, K, R] ns per group: the sum of these components of an excess or of work, [N, K, R, C]."""
    columns = [INDEX[name] for name in components]
    return [amount[..., columns].sum(axis=-1) for amount in amounts]
