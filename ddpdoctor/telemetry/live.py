"""A run directory followed while its job runs: what ``ddpdoctor watch`` draws and the exporter serves.

Files are read from where the last look ended, so a look costs what was recorded since, not what was recorded
in all.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ddpdoctor.rundir import (
    STEPS_FILE,
    TELEMETRY_FILE,
    EventField,
    EventKind,
    LineField,
    folders_in,
    parsed,
    read_manifest,
    read_rank,
    reading,
    renamed,
)
from ddpdoctor.rundir.compaction import stream_shift
from ddpdoctor.rundir.typed import TELEMETRY_SAMPLE, fitting, is_moment

_Nanoseconds = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]

KEPT_STEPS = 200
"""Newest steps kept of each rank."""

LOOK_BYTES = 8 << 20
"""Most read of one file at a look. A longer backlog (the first look at a long run) is passed over but for
its end."""


@dataclass(frozen=True)
class LiveStep:
    """One step of one rank. Times in ns; absent parts None."""

    number: int
    start_ns: int
    end_ns: int
    data_wait_ns: int | None
    samples: int | None
    arrival_ns: int | None
    """Epoch ns at which this rank's last gradient was ready: on a GPU, when the host had issued it."""

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


class _Event(msgspec.Struct, rename=renamed(EventField)):
    """What is read of an event of a step; :mod:`ddpdoctor.measure.steplog` reads all of it."""

    kind: str
    duration_ns: _Nanoseconds = 0
    count: _Nanoseconds | None = None
    exhausted: bool = False
    synced: bool | None = None
    ready_ns: list[_Nanoseconds] = []
    forward_end_ns: _Nanoseconds | None = None


class _Line(msgspec.Struct, rename=renamed(LineField)):
    """A step, or the end of the recording."""

    step: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] | None = None
    time_ns: tuple[_Nanoseconds, _Nanoseconds] | int | None = None
    # No bounds for the integer alone: msgspec 0.22 crashes in the garbage collection after it decoded such a union.
    thin: bool = False
    events: list[_Event] = []
    end: bool = False


_decode = msgspec.json.Decoder(_Line).decode


class Tail:
    """The whole lines that were added to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self.path, self._position = path, 0
        self._shift = 0
        """Bytes that thinning had taken from the file before ``_position``."""

    def new(self) -> Iterator[bytes]:
        """The new lines; none where the file is missing or is no regular file."""
        try:
            with reading(str(self.path)) as source:
                shift = stream_shift(source.fileno())
                self._position = max(0, self._position + self._shift - shift)
                self._shift = shift
                size = source.seek(0, 2)
                skipped = size - self._position > LOOK_BYTES
                source.seek(size - LOOK_BYTES if skipped else self._position)
                data = source.read(LOOK_BYTES)
        except OSError:
            return
        whole = data.rfind(b"\n") + 1
        self._position = size - len(data) + whole
        yield from data[:whole].split(b"\n")[1 if skipped else 0 : -1]


@dataclass
class LiveRank:
    """One rank as far as it was recorded."""

    rank: int
    host: str
    pid: int | None
    log: Tail
    steps: deque[LiveStep] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    ended: bool = False
    """Whether its process group was destroyed or its process has ended in order."""

    @property
    def steps_total(self) -> int:
        """Steps completed since recording began."""
        return self.steps[-1].number + 1 if self.steps else 0

    def look(self) -> None:
        """Take in the steps written since the last look; broken lines are passed over."""
        for text in self.log.new():
            try:
                line = _decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            if (
                line.step is not None
                and isinstance(line.time_ns, tuple)
                and line.time_ns[0] <= line.time_ns[1]
            ):
                self.steps.append(_step(line.step, line.time_ns, line))
                self.ended = False
            elif line.end:
                self.ended = True

    def since_last_step_s(self) -> float | None:
        """How long ago the newest step ended, by this machine's clock; None before the first one, and once the rank has ended."""
        if self.ended or not self.steps:
            return None
        return max(0.0, time.time() - self.steps[-1].end_ns / 1e9)

    def recent(self, count: int) -> list[LiveStep]:
        """The newest ``count`` steps, without the first of all: it holds the start of the job."""
        return [step for step in list(self.steps)[-count:] if step.number > 0]


def _step(number: int, times_ns: tuple[int, int], line: _Line) -> LiveStep:
    waits, samples, arrival = None, None, None
    for event in [] if line.thin else line.events:
        if event.kind == EventKind.DATA and not event.exhausted:
            waits = (waits or 0) + event.duration_ns
            samples = (samples or 0) + event.count if event.count is not None else samples
        elif (
            event.kind == EventKind.BACKWARD
            and event.synced
            and event.ready_ns
            and event.forward_end_ns is not None
        ):
            arrival = times_ns[0] + event.forward_end_ns + max(event.ready_ns)
    return LiveStep(number, *times_ns, waits, samples, arrival)


class LiveRun:
    """A run directory that may still be growing. ``look()`` brings everything up to date; nothing raises for
    what is missing or broken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: dict[str, Any] = {}
        self.ranks: dict[int, LiveRank] = {}
        self.samples: dict[str, dict[str, Any]] = {}
        """Newest telemetry sample by host."""
        self._telemetry: dict[str, Tail] = {}
        self._folders: set[str] = set()

    def look(self) -> None:
        """Read what is new."""
        self.manifest = read_manifest(str(self.path), []) or self.manifest
        for folder in _folders(self.path / "ranks"):
            if folder.name not in self._folders:
                self._add(folder)
        for rank in self.ranks.values():
            rank.look()
        for folder in _folders(self.path / "hosts"):
            tail = self._telemetry.setdefault(folder.name, Tail(folder / TELEMETRY_FILE))
            for line in tail.new():
                sample = _sample(line)
                # The final sample is taken when the ranks are gone.
                if sample is not None and not (sample.get("final") and folder.name in self.samples):
                    self.samples[folder.name] = sample

    def _add(self, folder: Path) -> None:
        """A newer recording of a rank (an elastic restart) takes the place of the older."""
        info = read_rank(str(folder), [])
        rank = None if info is None else info.get("rank")
        if info is None or rank is None:
            return
        self._folders.add(folder.name)
        self.ranks[rank] = LiveRank(
            rank, str(info.get("host") or ""), info.get("pid"), Tail(folder / STEPS_FILE)
        )
        self.ranks = dict(sorted(self.ranks.items()))

    @property
    def ended(self) -> bool:
        """Whether the launcher has written that its command ended."""
        return self.manifest.get("ended_ns") is not None

    def silent_s(self) -> float | None:
        """How long ago any rank that has not ended finished a step; None where none has, or the job has ended."""
        since = [] if self.ended else [live.since_last_step_s() for live in self.ranks.values()]
        return min((seconds for seconds in since if seconds is not None), default=None)

    @property
    def world_size(self) -> int:
        """Ranks seen so far."""
        return len(self.ranks)

    def lateness_ms(self, count: int) -> dict[int, float]:
        """Median lateness of each rank over the newest ``count`` steps: its arrival at the reduction of the
        gradients against the median of the other ranks', negative for those before it. Ranks that take turns
        in being late come out near zero. Only steps that all ranks have recorded in full are compared; empty
        where there are none, or one rank alone.
        """
        arrivals = {
            rank: {step.number: step for step in live.recent(count) if step.arrival_ns is not None}
            for rank, live in self.ranks.items()
        }
        if len(arrivals) < 2:
            return {}
        common = set.intersection(*(set(steps) for steps in arrivals.values()))
        late: dict[int, list[float]] = {rank: [] for rank in arrivals}
        for number in common:
            at = {rank: steps[number] for rank, steps in arrivals.items()}
            if self._clock_was_set(at):
                continue
            shift = self._clock_shifts(at)
            arrived = {r: (s.arrival_ns or 0) - shift[self.ranks[r].host] for r, s in at.items()}
            order = sorted(arrived.values())
            for rank, moment in arrived.items():
                late[rank].append((moment - _middle_of_others(order, moment)) / 1e6)
        return {rank: statistics.median(values) for rank, values in late.items() if values}

    def _clock_was_set(self, at: dict[int, LiveStep]) -> bool:
        """Whether ranks of one host read its clock before and behind a setting of it: their steps seem to end further apart
        than any of them is long, though the reduction holds them together."""
        ends: dict[str, list[int]] = {}
        for rank, step in at.items():
            ends.setdefault(self.ranks[rank].host, []).append(step.end_ns)
        longest = max(step.end_ns - step.start_ns for step in at.values())
        return any(max(values) - min(values) > longest for values in ends.values())

    def _clock_shifts(self, at: dict[int, LiveStep]) -> dict[str, float]:
        """By how many ns each host's clock seems ahead: by the ends of the step, which the reduction before
        the optimizer's step holds together. Zero for a single host."""
        ends: dict[str, list[int]] = {}
        for rank, step in at.items():
            ends.setdefault(self.ranks[rank].host, []).append(step.end_ns)
        medians = {host: statistics.median(values) for host, values in ends.items()}
        middle = statistics.median(medians.values())
        return {host: moment - middle for host, moment in medians.items()}

    def samples_per_s(self, count: int) -> float | None:
        """Samples of all ranks per second over the newest ``count`` steps; None where batches are unknown."""
        rates = []
        for live in self.ranks.values():
            steps = [step for step in live.recent(count) if step.samples]
            if not steps:
                return None
            whole_ms = _median([step.duration_ms for step in live.recent(count)])
            rates.append(
                statistics.fmean(step.samples or 0 for step in steps) / whole_ms * 1e3 if whole_ms else 0
            )
        return sum(rates) if rates else None


def step_ms(live: LiveRank, count: int) -> float | None:
    """Median step time of a rank over its newest ``count`` steps, in ms."""
    return _median([step.duration_ms for step in live.recent(count)])


def data_wait_ms(live: LiveRank, count: int) -> float | None:
    """Median time per step in which the rank's training thread waited for data, in ms."""
    return _median([s.data_wait_ns / 1e6 for s in live.recent(count) if s.data_wait_ns is not None])


def _middle_of_others(order: list[float], own: float) -> float:
    """Median of the sorted ``order`` without one entry that equals ``own``."""
    place, count = bisect.bisect_left(order, own), len(order) - 1
    low, high = ((count - 1) // 2, count // 2)
    return (order[low + (low >= place)] + order[high + (high >= place)]) / 2


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _sample(line: bytes) -> dict[str, Any] | None:
    """The sample in a line of telemetry, without what no sampler writes; None where the line is something else."""
    try:
        found, _ = parsed(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or "host" not in found or not is_moment(found.get("t_ns")):
        return None
    return fitting(found, TELEMETRY_SAMPLE, "", [])


def _folders(path: Path) -> list[Path]:
    try:
        return [path / name for name in folders_in(str(path))]
    except OSError:
        return []
