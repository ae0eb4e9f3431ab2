"""What a window holds in its marked steps: how many there are, and the collectives that belong to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import Intervals, union
from ddpdoctor.measure.window import UNKNOWN_STEP, Window, step_of_collectives


def marked_steps(windows: Sequence[Window]) -> float:
    """Steps that a window marks, median over those that mark any; 1.0 where none does."""
    marked = [len(window.steps) for window in windows if window.steps]
    return float(np.median(marked)) if marked else 1.0


def in_marked_steps(window: Window) -> NDArray[np.bool_]:
    """[M] the collectives that the host launched in the marked steps; all of them where none is marked."""
    inside: NDArray[np.bool_] = step_of_collectives(window) != UNKNOWN_STEP
    return inside


def of_kind(window: Window, kind: str) -> NDArray[np.bool_]:
    """[M] the collectives of one kind."""
    return np.array([own == kind for own in window.collectives.kind], bool)


def communicating(window: Window) -> Intervals:
    """When the rank is in any collective."""
    return union(window.collectives.start, window.collectives.end)
