"""Step logs of a run directory, one per rank, as typed records with absolute times."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from ddpdoctor.rundir import SAMPLES_FILE, STEPS_FILE, RankRecord

from .facts import Where

_MOST_STEPS = 60_000
"""Step records read of one rank; a longer log is read up to its end but kept only every n-th block."""


class Reduction(msgspec.Struct):
    """What one DDP module did in a backward pass; ``base`` is when its forward had ended, ``ready`` counts from it."""

    m: int
    sync: bool = False
    ready: list[int] = []
    base: int | None = None


class Event(msgspec.Struct):
    """Something that happened in a step; ``start_ns`` is epoch ns once :func:`read_rank_log` is through with
    it."""

    k: str
    s: int
    d: int
    w: int = -1
    l: int = -1  # noqa: E741
    n: int = -1
    e: int = -1
    q: int = -1
    end: bool = False
    m: int = -1
    sync: bool | None = None
    ready: list[int] = []
    base: int | None = None
    also: list[Reduction] = []
    o: int = -1
    op: str = ""
    pg: str = ""
    b: float | None = None
    is_async: bool = msgspec.field(default=False, name="async")
    src: int | None = None
    dst: int | None = None

    def move(self, offset_ns: int) -> None:
        """Shift all times."""
        self.s += offset_ns
        if self.base is not None:
            self.base += offset_ns
        for reduction in self.also:
            if reduction.base is not None:
                reduction.base += offset_ns

    @property
    def reductions(self) -> list[Reduction]:
        """The DDP modules whose gradients were reduced in this backward pass."""
        own = Reduction(self.m, bool(self.sync), self.ready, self.base)
        return [each for each in [own, *self.also] if each.sync and each.m >= 0]

    @property
    def stop(self) -> int:
        """End, in the unit and origin of ``s``."""
        return self.s + self.d


class _Line(msgspec.Struct):
    """Any line of steps.jsonl or samples.jsonl."""

    step: int | None = None
    t: list[int] | int | None = None
    ev: list[Event] = []
    marks: list[str] = []
    runq: int | None = None
    cpu: int | None = None
    self: int = 0
    where: int | None = None
    file: str = ""
    line: int | None = 0
    function: str = ""
    note: str | None = None
    s: list[list[int]] = []
    device: int | None = None
    at: int = 0
    times: list[tuple[str, int]] = []


@dataclass
class Step:
    """One step of one rank. All times epoch ns, already on the common clock where a shift was given."""

    number: int
    start: int
    end: int
    events: list[Event]
    marks: tuple[str, ...]
    run_delay_ns: int | None
    cpu_ns: int | None
    moved_ns: int = 0
    """By how much all times were moved since they were recorded, see :mod:`.chronology` and :mod:`.clockhosts`."""

    def move(self, offset_ns: int) -> None:
        """Shift all times."""
        self.start += offset_ns
        self.end += offset_ns
        self.moved_ns += offset_ns
        for event in self.events:
            event.move(offset_ns)


@dataclass(frozen=True)
class DeviceTimes:
    """When a step's work ran on its device, on that device's own clock, ns."""

    start: int
    """Since the first step that was timed."""
    marks: tuple[tuple[str, int], ...]
    """``fwd``, ``fwd_end``, ``bwd``, ``ready`` (the rank's own gradients are done), ``bwd_end``, ``opt``, ``opt_end`` and at
    last ``end``, each ns after ``start``."""


@dataclass
class RankLog:
    """What one rank's hook recorded."""

    rank: int
    record: RankRecord
    steps: list[Step] = field(default_factory=list)
    where: dict[int, Where] = field(default_factory=dict)
    samples: list[tuple[int, int, int]] = field(default_factory=list)
    """(epoch ns, user line, innermost line), ids into ``sample_where``."""
    sample_where: dict[int, Where] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    device_times: dict[int, DeviceTimes] = field(default_factory=dict)
    """By number of the step, where its CUDA events were recorded."""
    on_device_time: bool = False
    """Forward, backward and optimizer stand where the device ran them, see :mod:`.devicelog`."""

    @property
    def host(self) -> str:
        """Host name."""
        return self.record.host

    @cached_property
    def main_loaders(self) -> set[int]:
        """The loaders that give batches in at least a third of the steps; any other one evaluates."""
        used: Counter[int] = Counter()
        for step in self.steps:
            used.update({event.l for event in step.events if event.k == "data" and not event.end})
        return {loader for loader, times in used.items() if times * 3 >= len(self.steps)}


Sample = tuple[int, int, int]
"""Epoch ns, user line, innermost line; ids into :attr:`RankLog.sample_where`."""


def samples_by_step(log: RankLog, steps: Sequence[Step]) -> list[tuple[Step, list[Sample]]]:
    """The samples taken in each of some steps of ``log``; steps without one are left out."""
    starts = [step.start for step in steps]
    found: dict[int, list[Sample]] = {}
    for sample in log.samples:
        index = bisect_right(starts, sample[0]) - 1
        if index >= 0 and sample[0] < steps[index].end:
            found.setdefault(index, []).append(sample)
    return [(steps[index], samples) for index, samples in found.items()]


def _lines(record: RankRecord, name: str, notes: list[str]) -> Iterator[_Line]:
    decode = msgspec.json.Decoder(_Line).decode
    broken = 0
    try:
        for line in record.lines(name):
            try:
                yield decode(line)
            except msgspec.MsgspecError:
                broken += 1
    except OSError:
        pass
    if broken:
        path = Path(record.path) / name
        notes.append(f"{path}: {broken} broken line{'s' if broken > 1 else ''} left out.")


def read_rank_log(record: RankRecord) -> RankLog:
    """Read steps.jsonl and samples.jsonl of one rank; broken lines are left out and noted."""
    log, odd = RankLog(record.rank, record), 0
    for line in _lines(record, STEPS_FILE, log.notes):
        if line.step is not None and isinstance(line.t, list):
            if len(line.t) == 2 and line.t[0] <= line.t[1]:
                log.steps.append(_step(line.step, line))
            else:
                odd += 1
        elif line.device is not None and line.times:
            log.device_times[line.device] = DeviceTimes(line.at, tuple(line.times))
        elif line.where is not None:
            log.where[line.where] = Where(line.file, line.line or 0, line.function)
        elif line.note:
            log.notes.append(f"Rank {record.rank}: {line.note}")
    if odd:
        log.notes.append(f"{record.path}/{STEPS_FILE}: {odd} steps that end before they begin left out.")
    for line in _lines(record, SAMPLES_FILE, log.notes):
        if line.where is not None:
            log.sample_where[line.where] = Where(line.file, line.line or 0, line.function)
        elif isinstance(line.t, int):
            log.samples.extend(
                (line.t + item[0], item[1], item[2] if len(item) > 2 else item[1]) for item in line.s
            )
    if len(log.steps) > _MOST_STEPS:
        log.steps = _thin(log.steps)
    return log


def _step(number: int, line: _Line) -> Step:
    start, end = (line.t if isinstance(line.t, list) else [0, 0])[:2]
    for event in line.ev:
        event.move(start)
    return Step(number, start, end, line.ev, tuple(line.marks), line.runq, line.cpu)


def _thin(steps: list[Step]) -> list[Step]:
    """Blocks of 500 neighbouring steps, evenly spread, so that rhythms stay visible."""
    block = 500
    keep = _MOST_STEPS // block
    starts = {round(i * (len(steps) - block) / (keep - 1)) // block * block for i in range(keep)}
    return [step for start in sorted(starts) for step in steps[start : start + block]]
