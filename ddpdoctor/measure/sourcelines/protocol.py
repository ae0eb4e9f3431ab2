"""What all who know the source lines behind measurements can be asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.facts import Where


class Lines(Protocol):
    """Knows the user's source lines behind the measurements."""

    def work(
        self, components: Sequence[str], positions: Sequence[int] | None, steps: NDArray[np.int64]
    ) -> list[Where]:
        """Lines where these ranks (None: all) spend this kind of work in these steps, most time first."""

    def syncs(self, kinds: Sequence[str]) -> list[Where]:
        """Lines that call synchronisations of these kinds, or wait there for a device that then idles, most first."""

    def operation(self, components: Sequence[str], positions: Sequence[int] | None) -> str | None:
        """Name of what is executed there, where it has one; for a kind of synchronisation, of the call that waits."""
