"""Rank source lines by weight, and the interface :class:`SourceLines` of logs and windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ddpdoctor.measure.numerics import Ints
from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.measure.taxonomy import Component, SyncKind

from .gaps import MainGap

MOST_LINES = 3
"""Most lines reported for one cause."""


def ranked(weights: Mapping[CodeLine, float]) -> list[Where]:
    """The heaviest lines, the heaviest first, each with its share of the total weight."""
    total = sum(weights.values())
    most = sorted(weights.items(), key=lambda item: -item[1])[:MOST_LINES]
    return [
        Where(line.file, line.line, line.function, share=weight / total if total else None)
        for line, weight in most
    ]


def joined(first: list[Where], others: list[Where]) -> list[Where]:
    """The ``first`` lines, then those ``others`` that are not among them; ``MOST_LINES`` at most."""
    known = {(where.file, where.line) for where in first}
    return [*first, *(where for where in others if (where.file, where.line) not in known)][:MOST_LINES]


def chosen_and_others(positions: Sequence[int] | None, count: int) -> tuple[Sequence[int], Sequence[int]]:
    """(``positions``, or all of ``count`` where None; the other positions)."""
    if positions is None:
        return range(count), ()
    return positions, sorted(set(range(count)).difference(positions))


class SourceLines(Protocol):
    """The user's source lines behind the measurements of a recording."""

    def work(
        self,
        components: Sequence[Component],
        positions: Sequence[int] | None,
        steps: Ints,
        or_else: Ints | None = None,
    ) -> list[Where]:
        """Lines where these ranks (None: all) do this kind of work in these steps, most time first; in the steps ``or_else`` where
        these have too few samples."""

    def syncs(self, kinds: Sequence[SyncKind]) -> list[Where]:
        """Lines that call synchronisations of these kinds, or wait in them for a device that then idles, heaviest first."""

    def operation(
        self, components: Sequence[Component | SyncKind], positions: Sequence[int] | None
    ) -> str | None:
        """Name of the annotation or operator of this work; for a kind of synchronisation, of the call that waits. None if unknown."""

    def operators(self, components: Sequence[Component]) -> list[str]:
        """The torch operators that run on the hosts for at least a tenth of this kind of work, the longest first; [] where none does, or
        operators were not recorded."""
        return []

    def gap(
        self, components: Sequence[Component], positions: Sequence[int] | None, steps: Ints
    ) -> str | None:
        """The gap between phases with most of this kind of work, in words; None where it is in no gap."""
        found = self.main_gap(components, positions, steps)
        return None if found is None else found.words

    def main_gap(
        self, components: Sequence[Component], positions: Sequence[int] | None, steps: Ints
    ) -> MainGap | None:
        """The gap between phases with most of this kind of work of the host or its device; None where it is in no gap."""

    def in_common(self, components: Sequence[Component], steps: Ints) -> float | None:
        """Part (0 to 1) of the work of this kind, common to the ranks in these steps, that they do at the same lines; None where unknown,
        as in windows of a few steps."""
        return None
