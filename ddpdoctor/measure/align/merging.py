"""The collectives of a process group on all its ranks, merged into one sequence."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Ints

from .labels import Ordered
from .sequences import paired


def merged(
    members: Mapping[int, tuple[Ints, Ordered]], world: int, scatter_ns: float, clock_ns: float
) -> Ints:
    """[L, world] row of each collective in the windows of its members, in order; -1 where it is missing.

    ``members``: position → (rows in the window's collectives, the collectives on the common clock). One rank after the other
    is laid beside what those before it have; what they lack is put in where it comes.
    """
    lines: Ordered | None = None
    table = np.empty((0, world), np.int64)
    for position, (rows, own) in members.items():
        if lines is None:
            lines, table = own, np.full((len(rows), world), -1, np.int64)
            table[:, position] = rows
            continue
        row = paired(lines, own, scatter_ns, clock_ns)
        has = row >= 0
        table[row[has], position] = rows[has]
        lines = _met(lines, own, row)
        new = np.flatnonzero(~has)
        if not len(new):
            continue
        added = np.full((len(new), world), -1, np.int64)
        added[:, position] = rows[new]
        # Behind the last of its own that the lines know, in its own order.
        behind = np.maximum.accumulate(row)[new]
        place = np.concatenate((np.arange(len(lines)), behind))
        order = np.lexsort((np.concatenate((np.full(len(lines), -1), new)), place))
        lines = lines.joined(own.taken(new)).taken(order)
        table = np.concatenate((table, added))[order]
    return table


def _met(lines: Ordered, own: Ordered, row: Ints) -> Ordered:
    """The lines with one more member in these rows: the last has come later, the first has left earlier."""
    has = row >= 0
    at = row[has]
    start, left, step = lines.start.copy(), lines.left.copy(), lines.step.copy()
    start[at] = np.maximum(start[at], own.start[has])
    left[at] = np.minimum(left[at], own.left[has])
    step[at] = np.where(step[at] < 0, own.step[has], step[at])
    return replace(lines, start=start, left=left, step=step)
