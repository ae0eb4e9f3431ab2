"""Sequence numbers for Gloo, which writes none: step and place in the step.

Gloo's ends scatter by milliseconds on a busy machine, so coincidence of ends cannot pair them. Only steps
in which all ranks issued the same operations are numbered; a window may begin or end within a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ddpdoctor.measure.window import Window

_PLACES = 1_000_000
"""More than the collectives of a step, so that the numbers of steps do not meet."""

Order = dict[int, list[int]]
"""Step → rows of the collectives that the host issued in it, in order of issue."""


def numbered_by_step(windows: Sequence[Window]) -> list[Window]:
    """The windows with numbers on the collectives of alike steps; as they are where any has a device, numbers of its own, or
    no marked steps."""
    active = [window for window in windows if len(window.collectives)]
    if len(active) < 2 or any(_knows_better(window) for window in active):
        return list(windows)
    orders = [_per_step(window) for window in windows]
    known = [order for window, order in zip(windows, orders, strict=True) if len(window.collectives)]
    alike = {step for step in set.intersection(*map(set, known)) if _alike(active, known, step)}
    return [
        _numbered(window, order, alike) if len(window.collectives) else window
        for window, order in zip(windows, orders, strict=True)
    ]


def _knows_better(window: Window) -> bool:
    return window.on_device or not window.steps or bool((window.collectives.sequence >= 0).any())


def _per_step(window: Window) -> Order:
    starts = np.array([start for _, start, _ in window.steps])
    order: Order = defaultdict(list)
    for row in np.argsort(window.collectives.issued, kind="stable"):
        at = window.collectives.issued[row]
        index = int(np.searchsorted(starts, at, side="right")) - 1
        if index >= 0 and at < window.steps[index][2]:
            order[window.steps[index][0]].append(int(row))
    return order


def _alike(windows: Sequence[Window], orders: Sequence[Order], step: int) -> bool:
    """Whether all ranks issued the same operations in the step."""
    issued = [
        [window.collectives.operation[row] for row in order[step]]
        for window, order in zip(windows, orders, strict=True)
    ]
    return all(operations == issued[0] for operations in issued)


def _numbered(window: Window, order: Order, steps: set[int]) -> Window:
    sequence = window.collectives.sequence.copy()
    for step in steps:
        for place, row in enumerate(order[step]):
            sequence[row] = step * _PLACES + place
    return replace(window, collectives=replace(window.collectives, sequence=sequence))
