"""What all who know the source lines behind measurements can be asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ddpdoctor.measure.numerics import Ints
from ddpdoctor.measure.places import Where
from ddpdoctor.measure.taxonomy import Component, SyncKind


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

    def in_common(self, components: Sequence[Component], steps: Ints) -> float | None:
        """Part of what the ranks alike spend on this kind of work in these steps that they spend at the same lines; None where that
        is not known."""
