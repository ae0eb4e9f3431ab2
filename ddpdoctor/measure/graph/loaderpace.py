"""How fast each rank's loader workers make batches, also where the rank does not wait for them.

Ranks meet in every step, so the rank whose workers are slowest by a hair sets the pace: it waits for every
batch, while the others' workers, nearly as slow, build up a reserve and their ranks never wait. Mending only
the rank that waits would gain that hair. What tells is the pace of production: batches that were used plus
those that came to stand ready, over the time that took, while no worker was idle for want of room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.taxonomy import INDEX, Component
from ddpdoctor.rundir import EventKind

from .graph import CycleGroup

_FEWEST_PAIRS = 8
"""Pairs of neighbouring batches, and batches made between them, from which a batch time is taken."""
_DEFAULT_PREFETCH = 2
"""DataLoader's prefetch_factor."""


def batch_time_ns(log: RankLog) -> float | None:
    """Time that the workers of this rank's training loader take per batch, ns; None where there are none, or
    where a worker was always idle."""
    loader = log.main_loader_settings
    if loader is None or not loader.get("num_workers"):
        return None
    room = _room(loader)
    took, made, pairs = 0.0, 0, 0
    for one, two in _neighbours(log, loader["id"]):
        if 0 <= one.ready < room and 0 <= two.ready < room:
            # With a reserve of q batches at each request, this many were made between the two.
            took += two.start_ns - one.start_ns
            made += 1 + two.ready - one.ready
            pairs += 1
    if pairs < _FEWEST_PAIRS or made < _FEWEST_PAIRS:
        return None
    return took / made


def latent_data(
    group: CycleGroup,
    batch_times_ns: Sequence[float | None],
    batches: Sequence[float],
    waits: Array | None = None,
) -> Array | None:
    """[N, R] ns: the wait for data that each rank would have in each cycle if it waited for no other rank.

    A rank needs, for everything but data, the cycle without its own ``waits`` [N, R] (by default all of the group's); its
    workers need its batch time for each of its ``batches`` a step. None where no batch time is known.
    """
    if all(each is None for each in batch_times_ns):
        return None
    data = group.work[..., INDEX[Component.DATA]].sum(axis=1)
    rest = group.duration[:, None] - data - (np.nansum(group.wait, axis=1) if waits is None else waits)
    needed = np.array(
        [(each_ns or 0.0) * number for each_ns, number in zip(batch_times_ns, batches, strict=True)]
    )
    latent: Array = np.maximum(data, needed[None, :] - rest)
    return latent


def batches_per_step(log: RankLog) -> float:
    """Mean number of batches that the training loop takes in a step."""
    counts = [sum(event.gives_batch for event in step.events) for step in log.steps if step.events]
    return float(np.mean(counts)) if counts else 0.0


def _room(loader: dict[str, Any]) -> int:
    """Ready batches from which on some worker may have nothing to do: all its own are ready."""
    deep = loader.get("prefetch_factor") or _DEFAULT_PREFETCH
    return int((deep - 1) * loader["num_workers"] + 1)


class _Request(msgspec.Struct, frozen=True):
    """For a batch."""

    start_ns: int
    """Epoch ns."""
    ready: int
    """Batches that stood ready; -1 where that is not known."""


def _neighbours(log: RankLog, loader: int) -> Iterator[tuple[_Request, _Request]]:
    """Requests for two batches in a row, of the same pass over the loader and of neighbouring steps."""
    before: _Request | None = None
    last_step = None
    for step in log.steps:
        if not step.events or (last_step is not None and step.number != last_step + 1):
            before = None
        last_step = step.number
        for event in step.events:
            if event.kind == EventKind.ITERATION or event.exhausted:
                before = None
            elif event.kind == EventKind.DATA and event.loader == loader:
                request = _Request(step.start_of(event), event.batches_ready)
                if before is not None:
                    yield before, request
                before = request
