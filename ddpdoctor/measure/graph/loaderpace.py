"""How fast each rank's loader workers make batches, also where the rank does not wait for them.

Ranks meet in every step, so the rank whose workers are slowest by a hair sets the pace: it waits for every
batch, while the others' workers, nearly as slow, build up a reserve and their ranks never wait. Mending only
the rank that waits would gain that hair. What tells is the pace of production: batches that were used plus
those that came to stand ready, over the time that took, while no worker was idle for want of room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.steplog import Event, RankLog, main_loader_settings
from ddpdoctor.measure.taxonomy import INDEX
from ddpdoctor.rundir import EventKind

from .graph import CycleGroup

_FEWEST_PAIRS = 8
"""Pairs of neighbouring batches from which a pace is taken."""
_DEFAULT_PREFETCH = 2
"""DataLoader's prefetch_factor."""


def pace_ns(log: RankLog) -> float | None:
    """Time that the workers of this rank's training loader take per batch, ns; None where there are none, or
    where a worker was always idle."""
    loader = main_loader_settings(log)
    if loader is None or not loader.get("num_workers"):
        return None
    room = _room(loader)
    took, made, pairs = 0.0, 0, 0
    for one, two in _neighbours(log, loader["id"]):
        if 0 <= one.batches_ready < room and 0 <= two.batches_ready < room:
            # With a reserve of q batches at each request, this many were made between the two.
            took += two.start_ns - one.start_ns
            made += 1 + two.batches_ready - one.batches_ready
            pairs += 1
    if pairs < _FEWEST_PAIRS or made < _FEWEST_PAIRS:
        return None
    return took / made


def latent_data(
    group: CycleGroup,
    paces: Sequence[float | None],
    batches: Sequence[float],
    waits: Array | None = None,
) -> Array | None:
    """[N, R] ns: the wait for data that each rank would have in each cycle if it waited for no other rank.

    A rank needs, for everything but data, the cycle without its own ``waits`` [N, R] (by default all of the group's); its
    workers need ``pace`` for each of its ``batches`` a step. None where no pace is known.
    """
    if all(pace is None for pace in paces):
        return None
    data = group.work[..., INDEX["data"]].sum(axis=1)
    rest = group.duration[:, None] - data - (np.nansum(group.wait, axis=1) if waits is None else waits)
    needed = np.array([(pace or 0.0) * number for pace, number in zip(paces, batches, strict=True)])
    latent: Array = np.maximum(data, needed[None, :] - rest)
    return latent


def batches_per_step(log: RankLog) -> float:
    """Mean number of batches that the training loop takes in a step."""
    counts = [
        sum(e.kind == EventKind.DATA and not e.exhausted for e in step.events)
        for step in log.steps
        if step.events
    ]
    return float(np.mean(counts)) if counts else 0.0


def _room(loader: dict[str, Any]) -> int:
    """Ready batches from which on some worker may have nothing to do: all its own are ready."""
    deep = loader.get("prefetch_factor") or _DEFAULT_PREFETCH
    return int((deep - 1) * loader["num_workers"] + 1)


def _neighbours(log: RankLog, loader: int) -> list[tuple[Event, Event]]:
    """Requests for two batches in a row, of the same pass over the loader and of neighbouring steps."""
    pairs = []
    before: Event | None = None
    last_step = None
    for step in log.steps:
        if last_step is not None and step.number != last_step + 1:
            before = None
        last_step = step.number
        if not step.events:
            before = None
        for event in step.events:
            if event.kind == EventKind.ITERATION or event.exhausted:
                before = None
            elif event.kind == EventKind.DATA and event.loader == loader:
                if before is not None:
                    pairs.append((before, event))
                before = event
    return pairs
