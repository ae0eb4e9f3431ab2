"""What one rank's hook recorded, and what follows from that alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ddpdoctor.measure.facts import Where
from ddpdoctor.measure.numerics import Ints
from ddpdoctor.rundir import RankRecord

from .activities import Activities, activities_of
from .loaders import loaders_with_workers, settings_of, training_loaders, usual_loader
from .step import DeviceTimes, Step
from .syncpoints import SyncPoint, sync_points_of

Sample = list[int]
"""[epoch ns, user line, innermost line], as in a row of :attr:`RankLog.samples`."""


def no_samples() -> Ints:
    """[0, 3]"""
    return np.empty((0, 3), np.int64)


@dataclass(frozen=True, eq=False)
class RankLog:
    """What one rank's hook recorded. Nothing changes it: on another clock it is another log (:meth:`shifted`).

    What follows from it alone, such as where the rank synchronised, is found when it is first asked for, and kept with it.
    """

    rank: int
    record: RankRecord
    steps: Sequence[Step] = ()
    where: Mapping[int, Where] = field(default_factory=dict)
    samples: Ints = field(default_factory=no_samples)
    """[S, 3] epoch ns, user line, innermost line; the lines are ids into ``sample_where``."""
    sample_where: Mapping[int, Where] = field(default_factory=dict)
    notes: Sequence[str] = ()
    device_times: Mapping[int, DeviceTimes] = field(default_factory=dict)
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
    def main_loader_settings(self) -> dict[str, Any] | None:
        """What the rank says of the loader that gave most batches."""
        return settings_of(self.record.info, usual_loader(self.steps))

    @property
    def loaders_with_workers(self) -> set[int]:
        """Ids of the loaders that have worker processes."""
        return loaders_with_workers(self.record.info)

    def shifted(self, steps_ns: Ints, samples_ns: Ints | int) -> RankLog:
        """The same log on another clock, ``steps_ns`` [N] and ``samples_ns`` [S] later; itself where nothing moves."""
        samples = self.samples
        if np.any(samples_ns):
            samples = samples.copy()
            samples[:, 0] += samples_ns
            samples.flags.writeable = False
        steps = self.steps
        if steps_ns.any():
            steps = tuple(step.shifted(ns) for step, ns in zip(steps, steps_ns.tolist(), strict=True))
        if steps is self.steps and samples is self.samples:
            return self
        return replace(self, steps=steps, samples=samples)


def samples_by_step(log: RankLog, steps: Sequence[Step]) -> list[tuple[Step, list[Sample]]]:
    """The samples taken in each of some steps of ``log``; steps without one are left out."""
    if not len(log.samples) or not steps:
        return []
    starts = np.array([step.start_ns for step in steps], np.int64)
    ends = np.array([step.end_ns for step in steps], np.int64)
    times = log.samples[:, 0]
    places = np.searchsorted(starts, times, side="right") - 1
    inside = (places >= 0) & (times < ends[places])
    taken, places = log.samples[inside], places[inside]
    if not len(places):
        return []
    order = np.argsort(places, kind="stable")
    edges = np.flatnonzero(np.diff(places[order])) + 1
    seen, first = np.unique(places, return_index=True)
    groups = [group.tolist() for group in np.split(taken[order], edges)]
    return [(steps[int(seen[i])], groups[int(i)]) for i in np.argsort(first)]
