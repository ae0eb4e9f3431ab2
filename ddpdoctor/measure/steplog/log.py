"""Step logs of a run directory, one per rank, as typed records with absolute times."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from ddpdoctor.measure.facts import Where
from ddpdoctor.rundir import SAMPLES_FILE, STEPS_FILE, EventKind, RankRecord, RunDirectory
from ddpdoctor.rundir.compaction import STEP_LINE

from .bound import MOST_STEPS, Bound, bound_of
from .record import Event, Line, Reduction

__all__ = [
    "DeviceTimes",
    "Event",
    "RankLog",
    "Reduction",
    "Sample",
    "Step",
    "read_rank_log",
    "samples_by_step",
]

_MOST_PLACES = 100_000
"""Source lines, notes and broken numbers of one log that are kept: no script has as many."""
_MOST_NOTES = 200


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
    left_out: int = 0
    """Steps of the whole run that were recorded and not read, see :mod:`.stepbound`: the same of each rank."""

    @property
    def host(self) -> str:
        """Host name."""
        return self.record.host

    @cached_property
    def main_loaders(self) -> set[int]:
        """The loaders that give batches in at least a third of the steps; any other one evaluates."""
        used: Counter[int] = Counter()
        for step in self.steps:
            used.update(
                {
                    event.loader
                    for event in step.events
                    if event.kind == EventKind.DATA and not event.exhausted
                }
            )
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


@dataclass
class RunLogs:
    """What was read of one run directory."""

    logs: list[RankLog] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_logs(runs: Sequence[RunDirectory]) -> list[RunLogs]:
    """The step logs of a job that was recorded to ``runs``, with one bound for all; of each rank the first."""
    first: dict[int, RankRecord] = {}
    for run in runs:
        for record in run.ranks:
            first.setdefault(record.rank, record)
    bound = bound_of(list(first.values()))
    found = []
    for run in runs:
        of_run = RunLogs()
        for record in run.ranks:
            if first[record.rank] is record:
                of_run.logs.append(read_rank_log(record, bound))
                of_run.notes += of_run.logs[-1].notes
            else:
                of_run.notes.append(
                    f"{record.path}: rank {record.rank} was read from another folder already and is left out."
                )
        found.append(of_run)
    return found


def read_rank_log(record: RankRecord, bound: Bound | None = None) -> RankLog:
    """Read steps.jsonl and samples.jsonl of one rank; broken lines are left out and noted.

    ``bound`` is that of all ranks of the run; None: of this one alone.
    """
    bound = bound_of([record]) if bound is None else bound
    log = RankLog(record.rank, record, left_out=bound.left_out)
    _read_steps(log, bound)
    _read_samples(log, bound)
    return log


def _lines(record: RankRecord, name: str, bound: Bound, notes: list[str]) -> Iterator[tuple[Line, int]]:
    """The lines of a file that ``bound`` keeps, each with its bytes."""
    decode = msgspec.json.Decoder(Line).decode
    broken = 0
    try:
        for line in record.lines(name):
            if bound.kept is not None and (match := STEP_LINE.match(line)) and not bound.keeps(int(match[2])):
                continue
            try:
                yield decode(line), len(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                broken += 1
    except OSError:
        pass
    if broken:
        path = Path(record.path) / name
        notes.append(f"{path}: {broken} broken line{'s' if broken > 1 else ''} left out.")


def _read_steps(log: RankLog, bound: Bound) -> None:
    odd = beyond = size = 0
    path = f"{log.record.path}/{STEPS_FILE}"
    for line, line_bytes in _lines(log.record, STEPS_FILE, bound, log.notes):
        if line.step is not None and isinstance(line.time_ns, list):
            size += line_bytes
            if size > bound.most_bytes or not bound.keeps(line.step):
                beyond += 1
            elif len(line.time_ns) == 2 and line.time_ns[0] <= line.time_ns[1]:
                log.steps.append(_step(line.step, line))
            else:
                odd += 1
        elif line.device is not None and line.device_times_ns:
            if bound.keeps(line.device) and len(log.device_times) <= MOST_STEPS:
                log.device_times[line.device] = DeviceTimes(line.device_start_ns, tuple(line.device_times_ns))
        elif line.where is not None:
            _place(log.where, line)
        elif line.note and len(log.notes) < _MOST_NOTES:
            log.notes.append(f"Rank {log.rank}: {line.note}")
    if odd:
        log.notes.append(f"{path}: {odd} steps that end before they begin left out.")
    if beyond:
        log.notes.append(
            f"{path}: {beyond} lines of steps left out: they are larger, or more, than a rank writes."
        )


def _read_samples(log: RankLog, bound: Bound) -> None:
    """The samples taken in the steps that were read: all of them or, where they are too many, those of every second, every
    fourth, ... second of the epoch, the same on all ranks."""
    spans = None if bound.kept is None else _spans(log.steps)
    every = 1
    for line, _ in _lines(log.record, SAMPLES_FILE, bound, log.notes):
        if line.where is not None:
            _place(log.sample_where, line)
        elif isinstance(line.time_ns, int) and line.time_ns // 10**9 % every == 0:
            at = line.time_ns
            log.samples += [
                (at + item[0], item[1], item[2] if len(item) > 2 else item[1])
                for item in line.samples
                if spans is None or _inside(spans, at + item[0])
            ]
            while len(log.samples) > bound.most_samples:
                every *= 2
                log.samples = [sample for sample in log.samples if sample[0] // 10**9 % every == 0]


def _place(places: dict[int, Where], line: Line) -> None:
    if line.where is not None and len(places) < _MOST_PLACES:
        places[line.where] = Where(line.file, line.line or 0, line.function)


def _spans(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """(start, end) of runs of neighbouring steps."""
    spans: list[tuple[int, int]] = []
    for step in sorted(steps, key=lambda step: step.start):
        if spans and step.start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], step.end))
        else:
            spans.append((step.start, step.end))
    return spans


def _inside(spans: Sequence[tuple[int, int]], moment: int) -> bool:
    place = bisect_right(spans, moment, key=lambda span: span[0]) - 1
    return place >= 0 and moment < spans[place][1]


def _step(number: int, line: Line) -> Step:
    start, end = (line.time_ns if isinstance(line.time_ns, list) else [0, 0])[:2]
    for event in line.events:
        event.move(start)
    return Step(number, start, end, line.events, tuple(line.marks), line.run_delay_ns, line.cpu_ns)
