"""What one rank's hook recorded, and what follows from that alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Ints
from ddpdoctor.measure.places import Where
from ddpdoctor.rundir import RankRecord

from .activities import Activities, activities_of
from .loaders import evaluates, loaders_with_workers, settings_of, training_loaders, usual_loader
from .step import DeviceTimes, Step
from .syncpoints import SyncPoint, sync_points_of

Sample = list[int]
"""[epoch ns, user line, innermost line, ns waited for Python's lock], as in a row of :attr:`RankLog.samples`."""


def no_samples() -> Ints:
    """[0, 4]"""
    return np.empty((0, 4), np.int64)


class RankLog(msgspec.Struct, frozen=True, eq=False, dict=True):
    """What one rank's hook recorded. Nothing changes it: on another clock it is another log (:meth:`shifted`).

    What follows from it alone, such as where the rank synchronised, is found when it is first asked for, and kept with it.
    """

    rank: int
    record: RankRecord
    steps: Sequence[Step] = ()
    where: Mapping[int, Where] = msgspec.field(default_factory=dict)
    samples: Ints = msgspec.field(default_factory=no_samples)
    """[S, 4] epoch ns, user line, innermost line, ns that the sampling thread waited for Python's lock, 0 below
    :data:`ddpdoctor.rundir.HELD_NS`; the lines are ids into ``sample_where``."""
    sample_where: Mapping[int, Where] = msgspec.field(default_factory=dict)
    closer: Ints = msgspec.field(default_factory=no_samples)
    """[C, 4] the same of looks in close succession, of which only those are here that waited."""
    looked_ns: int = 0
    """For how long there were such looks."""
    notes: Sequence[str] = ()
    device_times: Mapping[int, DeviceTimes] = msgspec.field(default_factory=dict)
    """By number of the step, where its CUDA events were recorded."""
    on_device_time: bool = False
    """Forward, backward and optimizer stand where the device ran them, see :mod:`.devicetime`."""
    left_out: int = 0
    """Steps of the whole run that were recorded and not read, see :mod:`.bound`: the same of each rank."""

    @property
    def host(self) -> str:
        """Host name."""
        return self.record.host

    @property
    def start_ns(self) -> int:
        """Epoch ns at which the first step begins; 0 where there is none."""
        return self.steps[0].start_ns if self.steps else 0

    @cached_property
    def sync_points(self) -> list[SyncPoint]:
        """Where the rank synchronised with others, in order of its arrival."""
        return sync_points_of(self.steps, self.record.info)

    @cached_property
    def activities(self) -> Activities:
        """What the training thread did at any time, from :attr:`start_ns` on."""
        return activities_of(self.steps, self.start_ns, self.loaders_with_workers, self.on_device_time)

    @cached_property
    def main_loaders(self) -> frozenset[int]:
        """The loaders that feed the training; any other one evaluates."""
        return training_loaders(self.steps)

    @cached_property
    def evaluated(self) -> frozenset[int]:
        """Numbers of the steps in which the job evaluates: a forward without gradients, batches of another loader than the main ones, or
        models in evaluation mode."""
        return frozenset(step.number for step in self.steps if evaluates(step, self.main_loaders))

    @cached_property
    def main_loader_settings(self) -> dict[str, Any] | None:
        """What the rank says of the loader that gave most batches."""
        return settings_of(self.record.info, usual_loader(self.steps))

    @property
    def loaders_with_workers(self) -> set[int]:
        """Ids of the loaders that have worker processes."""
        return loaders_with_workers(self.record.info)

    def shifted(self, steps_ns: Ints, samples_ns: Ints | int) -> RankLog:
        """The same log on another clock, ``steps_ns`` [N] and ``samples_ns`` [S] later; itself where nothing moves."""
        samples, closer = self.samples, self.closer
        if np.any(samples_ns):
            samples = samples.copy()
            samples[:, 0] += samples_ns
            samples.flags.writeable = False
            closer = self.closer.copy()
            closer[:, 0] += _shift_of(closer[:, 0], self.samples[:, 0], samples_ns)
            closer.flags.writeable = False
        steps = self.steps
        if steps_ns.any():
            steps = tuple(step.shifted(ns) for step, ns in zip(steps, steps_ns.tolist(), strict=True))
        if steps is self.steps and samples is self.samples:
            return self
        return replace(self, steps=steps, samples=samples, closer=closer)


def _shift_of(times: Ints, known: Ints, shifts: Ints | int) -> Ints | int:
    """By how much the moments ``times`` move, where the moments ``known`` move by ``shifts``: as the one before."""
    if isinstance(shifts, int) or not len(known):
        return 0 if not isinstance(shifts, int) else shifts
    moved: Ints = shifts[np.maximum(np.searchsorted(known, times, side="right") - 1, 0)]
    return moved


def samples_by_step(samples: Ints, steps: Sequence[Step]) -> list[tuple[Step, list[Sample]]]:
    """Which of the ``samples`` [S, 4] were taken in each of some steps of the same log; steps without one are left out."""
    if not len(samples) or not steps:
        return []
    starts = np.array([step.start_ns for step in steps], np.int64)
    ends = np.array([step.end_ns for step in steps], np.int64)
    times = samples[:, 0]
    places = np.searchsorted(starts, times, side="right") - 1
    inside = (places >= 0) & (times < ends[places])
    taken, places = samples[inside], places[inside]
    if not len(places):
        return []
    order = np.argsort(places, kind="stable")
    edges = np.flatnonzero(np.diff(places[order])) + 1
    seen, first = np.unique(places, return_index=True)
    groups = [group.tolist() for group in np.split(taken[order], edges)]
    return [(steps[int(seen[i])], groups[int(i)]) for i in np.argsort(first)]
