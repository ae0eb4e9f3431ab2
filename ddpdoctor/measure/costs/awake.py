"""Whether a thread that takes long does anything meanwhile: one that sleeps, or waits for a file or the network, is not on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpdoctor.measure.graph import Graph, RankSteps
from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.taxonomy import INDEX, WAITING_FOR_DATA, Component

_RECORDED = [INDEX[name] for name in (*WAITING_FOR_DATA, Component.CHECKPOINT)]
"""Work that is waiting, or may be, and is told as such."""


def awake_longer_ms(graph: Graph, removed: Sequence[Array], positions: Sequence[int]) -> float | None:
    """By how much the training threads of these ranks, on average, ran or were ready to longer than those of the others, in the steps in
    which they are late by ``removed`` [N, K, R] ns per group. None where the scheduler's times are not known, or on a device, whose host
    sleeps while it waits for it."""
    if any(group.on_device for group in graph.groups):
        return None
    numbers = np.concatenate([group.steps for group in graph.groups])
    late = np.concatenate([of_group.sum(axis=1) for of_group in removed])
    others = [position for position in range(len(graph.ranks)) if position not in positions]
    longer_ns = []
    for position in positions:
        hit = numbers[late[:, position] > 0]
        own = _awake_ns(graph.steps[position], hit)
        theirs = [ns for other in others if (ns := _awake_ns(graph.steps[other], hit)) is not None]
        if own is None or not theirs:
            return None
        longer_ns.append(own - float(np.median(theirs)))
    return float(np.mean(longer_ns)) / 1e6 if longer_ns else None


def awake_of_all_ms(graph: Graph, own_ms: float | None) -> float | None:
    """Of the host work that all ranks do, ``own_ms`` a step, what their training threads ran at least, or were ready to: all time in
    which none of them was on a CPU is taken off that is no recorded waiting. None as for late ranks."""
    if own_ms is None or not graph.groups or any(group.on_device for group in graph.groups):
        return None
    numbers = np.concatenate([group.steps for group in graph.groups])
    asleep_ns = []
    for position, steps in enumerate(graph.steps):
        awake_ns = _awake_ns(steps, numbers)
        if awake_ns is None:
            return None
        waited = [
            np.nan_to_num(group.end[:, :, position] - group.arrival[:, :, position]).sum(axis=1)
            + group.work[:, :, position, _RECORDED].sum(axis=(1, 2))
            for group in graph.groups
        ]
        length = np.concatenate([group.duration for group in graph.groups])
        asleep_ns.append(float(np.median(length - np.concatenate(waited))) - awake_ns)
    return max(own_ms - max(min(asleep_ns), 0.0) / 1e6, 0.0)


def _awake_ns(steps: RankSteps, numbers: Array) -> float | None:
    """In the median of these steps; None where it is known of none."""
    if steps.cpu is None:
        return None
    awake = (steps.cpu + np.nan_to_num(steps.run_delay))[np.isin(steps.steps, numbers)]
    known = awake[~np.isnan(awake)]
    return float(np.median(known)) if len(known) else None
