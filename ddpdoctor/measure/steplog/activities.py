"""What the training thread of a rank was doing at any time, from its step log."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import EMPTY, Array, Intervals, covered, subtract, union
from ddpdoctor.measure.taxonomy import COMPONENTS, INDEX
from ddpdoctor.rundir import EventKind

from .loaders import loaders_with_workers
from .log import RankLog
from .syncpoints import gradients_ready

_EPOCH_START_BATCHES = 1
"""Batches after ``iter(loader)`` that still wait for the workers to start."""


_HOST = ("collection", "checkpoint", "epoch_start", "data")
_DEVICE = ("optimizer", "backward", "forward")


class Activities:
    """Disjoint interval sets per component. Where activities nest, the more specific one counts: a garbage
    collection inside a forward pass is a collection. In device time, a device that is at work comes first: what its host
    does meanwhile holds up nothing."""

    def __init__(self, log: RankLog, origin: int) -> None:
        found = _collect(log, origin)
        self.sets: dict[str, Intervals] = {}
        taken = EMPTY
        for name in (*_DEVICE, *_HOST) if log.on_device_time else (*_HOST, *_DEVICE):
            raw = union(*_columns(found.get(name, [])))
            self.sets[name] = subtract(raw, taken)
            taken = union(np.concatenate((taken[0], raw[0])), np.concatenate((taken[1], raw[1])))

    def between(self, left: Array, right: Array) -> NDArray[np.float64]:
        """[N, C] ns of each component in each window; what nothing recorded covers is ``host``."""
        result = np.zeros((len(left), len(COMPONENTS)))
        for name, intervals in self.sets.items():
            result[:, INDEX[name]] = covered(intervals, left, right)
        # A rank may be woken after it had arrived at the next point by another's clock: such a segment is
        # empty, or negative by a hair.
        result[:, INDEX["host"]] = (right - left) - result.sum(axis=1)
        return result


def _columns(pairs: Iterable[tuple[int, int]]) -> tuple[Array, Array]:
    table = np.array(list(pairs), float).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _collect(log: RankLog, origin: int) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}

    def add(name: str, start: int, end: int) -> None:
        found.setdefault(name, []).append((start - origin, end - origin))

    with_workers = loaders_with_workers(log)
    fresh: dict[int, int] = {}
    for step in log.steps:
        for event in step.events:
            if event.kind == EventKind.ITERATION:
                fresh[event.loader] = _EPOCH_START_BATCHES if event.loader in with_workers else 0
                add("epoch_start", event.start_ns, event.end_ns)
            elif event.kind == EventKind.DATA:
                first = fresh.get(event.loader, 0) > 0
                fresh[event.loader] = fresh.get(event.loader, 0) - 1
                add("epoch_start" if first or event.exhausted else "data", event.start_ns, event.end_ns)
            elif event.kind == EventKind.BACKWARD:
                add("backward", event.start_ns, min(gradients_ready(event), event.end_ns))
            elif event.kind == EventKind.OPTIMIZER:
                add("optimizer", event.start_ns, event.end_ns)
            elif event.kind == EventKind.COLLECTION:
                add("collection", event.start_ns, event.end_ns)
            elif event.kind == EventKind.SAVE:
                add("checkpoint", event.start_ns, event.end_ns)
            elif event.kind in (EventKind.FORWARD, EventKind.EVALUATION):
                add("forward", event.start_ns, event.end_ns)
    return found
