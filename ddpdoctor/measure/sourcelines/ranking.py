"""The user's source lines, ranked; and what all who know the lines behind measurements can be asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ddpdoctor.measure.numerics import Ints
from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.measure.taxonomy import Component, SyncKind

from .gaps import MainGap

MOST_LINES = 3
"""Lines that are told of one cause: a finding names where to look, and who looks there sees the rest."""


def ranked(weights: Mapping[CodeLine, float]) -> list[Where]:
    """The lines of most weight, most first, each with its share of all."""
    total = sum(weights.values())
    most = sorted(weights.items(), key=lambda item: -item[1])[:MOST_LINES]
    return [
        Where(line.file, line.line, line.function, share=weight / total if total else None)
        for line, weight in most
    ]


def joined(first: list[Where], others: list[Where]) -> list[Where]:
    """The ``first`` lines, then those ``others`` that are not among them, no more than are told."""
    known = {(where.file, where.line) for where in first}
    return [*first, *(where for where in others if (where.file, where.line) not in known)][:MOST_LINES]


def chosen_and_others(positions: Sequence[int] | None, count: int) -> tuple[Sequence[int], Sequence[int]]:
    """The positions (None: all of so many), and the rest."""
    if positions is None:
        return range(count), ()
    return positions, sorted(set(range(count)).difference(positions))


class SourceLines(Protocol):
    """Knows the user's source lines behind the measurements."""

    def work(
        self,
        components: Sequence[Component],
        positions: Sequence[int] | None,
        steps: Ints,
        or_else: Ints | None = None,
    ) -> list[Where]:
        """Lines where these ranks (None: all) spend this kind of work in these steps, most time first; where too few samples were
        taken in them, ``or_else`` in those."""

    def syncs(self, kinds: Sequence[SyncKind]) -> list[Where]:
        """Lines that call synchronisations of these kinds, or wait there for a device that then idles, most first."""

    def operation(
        self, components: Sequence[Component | SyncKind], positions: Sequence[int] | None
    ) -> str | None:
        """Name of what is executed there, where it has one; for a kind of synchronisation, of the call that waits."""

    def gap(
        self, components: Sequence[Component], positions: Sequence[int] | None, steps: Ints
    ) -> str | None:
        """Between which phases of a training step most of this kind of work lies, in words; None where it lies in no gap."""
        found = self.main_gap(components, positions, steps)
        return None if found is None else found.words

    def main_gap(
        self, components: Sequence[Component], positions: Sequence[int] | None, steps: Ints
    ) -> MainGap | None:
        """The same as it is: of what the host does between its phases, and its device for that."""

    def in_common(self, components: Sequence[Component], steps: Ints) -> float | None:
        """Part of what the ranks alike spend on this kind of work in these steps that they spend at the same lines; None where that
        is not known, as a few steps of a window do not tell."""
        return None
