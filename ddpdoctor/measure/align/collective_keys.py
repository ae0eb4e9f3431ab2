"""The key of a collective on every rank: its process group, operation, size, sequence number and step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Ints, Mask
from ddpdoctor.measure.window import UNKNOWN_STEP, Window, step_of_collectives

_UNEQUAL = ("alltoall", "sendrecv", "send", "recv", "gather", "scatter", "unknown")
"""Operations to which ranks may contribute different amounts: their sizes identify nothing."""
_ROOTED = ("broadcast", "reduce", "gather", "scatter", "send", "recv", "unknown")
"""Operations that a rank may leave before another arrives: a rank that only sends need not wait for the receivers."""
_COLUMNS = ("label", "kind", "step", "start", "end", "left", "synchronizes")


class CollectiveSequence(msgspec.Struct, frozen=True):
    """Collectives of one process group in order, [M]; times int64 ns."""

    label: Ints
    """Equal on all ranks: a code for operation and size, and the collective's number where it has one."""
    kind: Ints
    """The same without the number."""
    step: Ints
    """Step in which the host launched it; -1 unknown, and where its number identifies it: windows may count their steps from their own
    beginnings."""
    start: Ints
    """Latest start among the members known so far."""
    end: Ints
    left: Ints
    """Earliest end among the members known so far."""
    synchronizes: Mask
    """Whether no rank leaves it before all have arrived, and no sequence number identifies it."""
    one_order: bool = False
    """Whether all streams have one order: the group is known, or its host issues the collectives one by one."""
    on_device: bool = True
    """If false, an end is delayed until a thread gets a CPU."""

    def __len__(self) -> int:
        return len(self.label)

    def select(self, rows: Ints) -> CollectiveSequence:
        """These rows only."""
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return replace(self, **columns)

    def joined(self, more: CollectiveSequence) -> CollectiveSequence:
        """The collectives of ``self`` followed by those of ``more``."""
        columns: dict[str, Any] = {
            name: np.concatenate((getattr(self, name), getattr(more, name))) for name in _COLUMNS
        }
        return replace(self, **columns)

    def by_clock(self, correction_ns: Ints) -> CollectiveSequence:
        """The same on another clock, ``correction_ns`` to be added at each end."""
        moved = {name: getattr(self, name) + correction_ns for name in ("start", "end", "left")}
        return replace(self, **moved)


def steps_differ(a: Ints, b: Ints) -> Mask:
    """Where both steps are known and different."""
    different: Mask = (a >= 0) & (b >= 0) & (a != b)
    return different


def can_be_same(reference: CollectiveSequence, other: CollectiveSequence, row: Ints, error_ns: float) -> Mask:
    """[M] whether each of ``other`` can be the one in this ``row`` of ``reference``: neither rank starts after the other has left."""
    after = np.maximum(reference.start[row] - other.left, other.start - reference.left[row])
    possible: Mask = (row >= 0) & ((after <= error_ns) | ~other.synchronizes)
    return possible


Groups = dict[Hashable, tuple[Ints, CollectiveSequence]]
"""Process group → rows in the window's collectives, and the collectives in their order."""


def group_keys(window: Window) -> list[Hashable]:
    """Process group of each collective, with its ranks where the file lists them: names repeat between disjoint groups in some
    versions. As text, whose hash is cached: a group may have thousands of ranks."""
    known: dict[str, Hashable] = {}
    for group in window.trace.meta.process_groups:
        if group.get("ranks"):
            known.setdefault(str(group.get("pg_name")), f"{group.get('pg_name')} {group['ranks']}")
    return [known.get(name, name) for name in window.collectives.group]


def sequences_of(windows: Sequence[Window], numbers: bool = True) -> list[Groups]:
    """For each window its collectives by process group, without those between two ranks. ``numbers``: whether sequence numbers are part
    of the labels."""
    keys = _with_missing_names([group_keys(window) for window in windows])
    sizes = [_sizes(window, of_window) for window, of_window in zip(windows, keys, strict=True)]
    only = _only_sizes(windows, keys, sizes)
    codes: dict[Hashable, int] = {}
    found = []
    for window, of_window, size in zip(windows, keys, sizes, strict=True):
        comms = window.collectives
        sequence = comms.sequence if numbers else np.full(len(comms), -1, np.int64)
        kinds = [
            codes.setdefault((op, only.get((key, op)) if of < 0 else of), len(codes))
            for key, op, of in zip(of_window, comms.operation, size, strict=True)
        ]
        labels = [
            codes.setdefault((kind, number), len(codes)) if number >= 0 else kind
            for kind, number in zip(kinds, sequence.tolist(), strict=True)
        ]
        found.append(_by_group(window, of_window, np.array(labels, np.int64), np.array(kinds, np.int64)))
    return found


def _by_group(window: Window, keys: Sequence[Hashable], label: Ints, kind: Ints) -> Groups:
    comms = window.collectives
    step = step_of_collectives(window) if window.steps else np.full(len(comms), UNKNOWN_STEP)
    synchronizes = ~np.isin(np.array(comms.operation, dtype=str), _ROOTED) & (label == kind)
    codes: dict[Hashable, int] = {}
    code = np.array([codes.setdefault(key, len(codes)) for key in keys], np.int64)
    groups: Groups = {}
    for key, number in codes.items():
        rows = np.flatnonzero((code == number) & ~comms.point_to_point)
        rows = rows[np.argsort(comms.start[rows], kind="stable")]
        if len(rows):
            groups[key] = (
                rows,
                CollectiveSequence(
                    label[rows],
                    kind[rows],
                    np.where(label == kind, step, UNKNOWN_STEP)[rows],
                    comms.start[rows],
                    comms.end[rows],
                    comms.end[rows],
                    synchronizes[rows],
                    one_order=key != "" or not window.on_device,
                    on_device=window.on_device,
                ),
            )
    return groups


def _with_missing_names(keys: list[list[Hashable]]) -> list[list[Hashable]]:
    """The keys, where only one group is named: collectives without a name get that name."""
    names = {key for of_window in keys for key in set(of_window)}
    named = names - {""}
    if len(named) != 1 or "" not in names:
        return keys
    return [[next(iter(named))] * len(of_window) for of_window in keys]


def _sizes(window: Window, keys: Sequence[Hashable]) -> list[float]:
    """Bytes of each collective, -1 where they are unknown or identify nothing."""
    comms = window.collectives
    known = np.nan_to_num(comms.bytes, nan=-1.0).tolist()
    return [-1.0 if op in _UNEQUAL else size for op, size in zip(comms.operation, known, strict=True)]


def _only_sizes(
    windows: Sequence[Window], keys: Sequence[Sequence[Hashable]], sizes: Sequence[Sequence[float]]
) -> dict[Hashable, float]:
    """(Group, operation) → the size of those whose size is known, where all have the same."""
    seen: dict[Hashable, set[float]] = defaultdict(set)
    for window, of_window, size in zip(windows, keys, sizes, strict=True):
        for what in set(zip(of_window, window.collectives.operation, size, strict=True)):
            seen[what[:2]].add(what[2])
    return {what: max(of) for what, of in seen.items() if len(of - {-1.0}) == 1}
