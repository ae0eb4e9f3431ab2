"""Read the step logs of a run directory, with a limit on their size: one frozen :class:`.RankLog` per rank."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Ints, union
from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.rundir import SAMPLES_FILE, STEPS_FILE, WORKERS_FILE
from ddpdoctor.rundir.compaction import STEP_LINE
from ddpdoctor.rundir.files import broken_lines, unreadable
from ddpdoctor.rundir.reader import RankRecord, RunDirectory

from .log import UNKNOWN_LINES, RankLog
from .read_limit import MOST_STEPS, ReadLimit, read_limit_of
from .records import (
    EVALUATED,
    MOST_CALLERS,
    DeviceTimes,
    LogRecord,
    Step,
    WorkerLine,
    WorkerLog,
    WorkerSample,
)

_MOST_PLACES = 100_000
"""Source lines read per log; no script has as many."""
_MOST_GROUPS = 1024
"""Consecutive process groups distinguished per log."""
_MOST_NOTES = 200
"""Notes read per log."""
_LOST_INFORMATION = {
    STEPS_FILE: "what this rank did in the steps behind the fault is not known",
    SAMPLES_FILE: UNKNOWN_LINES,
    WORKERS_FILE: "what the workers of its data loaders did is not known",
}
_MOST_WORKER_BYTES = 4 << 20
"""Bytes of workers.jsonl that are read; the hook writes less than a quarter of that."""
_COLUMNS = 4
"""Numbers per sample."""
_SECOND_NS = 10**9
"""Samples are thinned out by whole seconds."""
_YEAR_NS = 366 * 86_400 * _SECOND_NS
_MAX_THINNING_S = 1 << 20
"""Upper limit, 12 days, of the distance between kept seconds when samples are thinned out."""


class RunLogs(msgspec.Struct, frozen=True):
    """Step logs and notes of one run directory."""

    logs: Sequence[RankLog]
    notes: Sequence[str]


def read_logs(
    runs: Sequence[RunDirectory], progress: Callable[[int, int], None] | None = None
) -> list[RunLogs]:
    """Reads the step logs of a job recorded to ``runs``, with one limit for all. If a rank is in several runs, its first log is read.

    ``progress(done, total)`` is called with numbers of ranks, first with 0 done.
    """
    first: dict[int, RankRecord] = {}
    for run in runs:
        for record in run.ranks:
            first.setdefault(record.rank, record)
    if progress is not None and first:
        progress(0, len(first))
    limit = read_limit_of(list(first.values()))
    read: dict[int, RankLog] = {}
    for rank, record in first.items():
        read[rank] = read_rank_log(record, limit)
        if progress is not None:
            progress(len(read), len(first))
    return [_logs_of_run(run, first, read) for run in runs]


def _logs_of_run(run: RunDirectory, first: dict[int, RankRecord], read: dict[int, RankLog]) -> RunLogs:
    logs: list[RankLog] = []
    notes: list[str] = []
    for record in run.ranks:
        if first[record.rank] is record:
            logs.append(read[record.rank])
            notes += logs[-1].notes
        else:
            notes.append(
                f"{record.path}: rank {record.rank} was already read from another folder and is skipped. `ddpdoctor compare` compares "
                "two runs."
            )
    return RunLogs(logs, notes)


def read_rank_log(record: RankRecord, limit: ReadLimit | None = None) -> RankLog:
    """Reads the step log, samples and worker records of one rank. Broken lines are skipped and noted.

    ``limit``: the limit for all ranks of the run; None: computed for this rank alone.
    """
    limit = read_limit_of([record]) if limit is None else limit
    read = _read_steps(record, limit)
    sampled = _read_samples(record, limit, read.steps)
    worker_notes: list[str] = []
    workers = _read_worker_logs(record, worker_notes)
    return RankLog(
        record.rank,
        record,
        tuple(read.steps),
        read.where,
        samples=sampled.table(sampled.samples),
        sample_where=sampled.where,
        samples_every_s=sampled.every_s,
        burst_samples=sampled.table(sampled.burst_samples),
        burst_ns=sampled.burst_ns,
        notes=[*read.notes, *sampled.notes, *worker_notes],
        device_times=read.device_times,
        left_out=limit.left_out,
        group_ends_ns=read.group_ends_ns[:_MOST_GROUPS],
        saved=read.saved,
        workers=workers,
    )


class _StepsFile(msgspec.Struct):
    """Contents of a rank's steps.jsonl."""

    steps: list[Step] = msgspec.field(default_factory=list)
    where: dict[int, Where] = msgspec.field(default_factory=dict)
    device_times: dict[int, DeviceTimes] = msgspec.field(default_factory=dict)
    evaluated: set[int] = msgspec.field(default_factory=set)
    group_ends_ns: list[int] = msgspec.field(default_factory=list)
    saved: int | None = None
    notes: list[str] = msgspec.field(default_factory=list)


def _records(
    record: RankRecord, name: str, limit: ReadLimit, notes: list[str]
) -> Iterator[tuple[LogRecord, int]]:
    """The lines of a file within ``limit``, each with its size in bytes."""
    lines: Iterable[bytes] = record.lines(name)
    if limit.numbers is not None:
        lines = (
            line for line in lines if not (match := STEP_LINE.match(line)) or limit.includes(int(match[2]))
        )
    return _decoded_lines(record, name, lines, LogRecord, notes)


_Line = TypeVar("_Line", LogRecord, WorkerLine)


def _decoded_lines(
    record: RankRecord, name: str, lines: Iterable[bytes], kind: type[_Line], notes: list[str]
) -> Iterator[tuple[_Line, int]]:
    """The decoded ``lines`` of a file, each with its size in bytes. Broken lines are counted in a note."""
    decode = msgspec.json.Decoder(kind).decode
    path, broken, given = f"{record.path}/{name}", 0, 0
    try:
        for line in lines:
            try:
                yield decode(line), len(line)
                given += 1
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                broken += 1
    except FileNotFoundError:
        pass
    except OSError as error:
        if given or name != STEPS_FILE:  # a rank without any step gets a note from notes_on_records
            notes.append(unreadable(path, error, _LOST_INFORMATION[name]).text)
    if broken:
        notes.append(broken_lines(path, broken).text)


def _read_steps(rank: RankRecord, limit: ReadLimit) -> _StepsFile:
    read = _StepsFile()
    invalid_steps = excluded_steps = size = 0
    for record, record_bytes in _records(rank, STEPS_FILE, limit, read.notes):
        if record.step is not None and isinstance(record.time_ns, list):
            size += record_bytes
            if size > limit.most_bytes or not limit.includes(record.step):
                excluded_steps += 1
            elif len(record.time_ns) == 2 and record.time_ns[0] < record.time_ns[1]:
                own = record.events, record.marks, record.run_delay_ns, record.cpu_ns
                read.steps.append(Step(record.step, record.time_ns[0], record.time_ns[1], *own))
            else:
                invalid_steps += 1
        else:
            _read_other_line(read, record, limit, rank.rank)
    read.steps = [step.with_mark(EVALUATED) if step.number in read.evaluated else step for step in read.steps]
    path = f"{rank.path}/{STEPS_FILE}"
    if invalid_steps:
        what = (
            "1 step that does not end after its"
            if invalid_steps == 1
            else f"{invalid_steps} steps that do not end after their"
        )
        read.notes.append(f"{path}: {what} beginning left out.")
    if excluded_steps:
        read.notes.append(
            f"{path}: {excluded_steps} lines of steps left out: they are larger, or more, than a rank writes."
        )
    return read


def _read_other_line(read: _StepsFile, record: LogRecord, limit: ReadLimit, rank: int) -> None:
    """Reads a line that is not a step: device times, an evaluation mark, a saved checkpoint, a source line, the end of a process group or
    a note."""
    if record.device is not None and record.device_times_ns:
        if limit.includes(record.device) and len(read.device_times) <= MOST_STEPS:
            read.device_times[record.device] = DeviceTimes(record.device_start_ns, record.device_times_ns)
    elif record.evaluated is not None:
        read.evaluated.add(record.evaluated)
    elif record.saved is not None:
        read.saved = max(record.saved, read.saved or 0)
    elif record.where is not None:
        _add_source_line(read.where, record)
    elif record.end and isinstance(record.time_ns, int):
        read.group_ends_ns.append(record.time_ns)
    elif record.note and len(read.notes) < _MOST_NOTES:
        read.notes.append(f"Rank {rank}: {record.note}")


class _SamplesFile(msgspec.Struct):
    """Contents of a rank's samples.jsonl."""

    samples: array[int] = msgspec.field(default_factory=lambda: array("q"))
    every_s: int = 1
    """Samples of every n-th second are kept."""
    burst_samples: array[int] = msgspec.field(default_factory=lambda: array("q"))
    burst_ns: int = 0
    where: dict[int, Where] = msgspec.field(default_factory=dict)
    notes: list[str] = msgspec.field(default_factory=list)

    @staticmethod
    def table(numbers: array[int]) -> Ints:
        """[S, 4], see :attr:`RankLog.samples`."""
        rows = np.array(numbers, np.int64).reshape(-1, _COLUMNS)
        rows.flags.writeable = False
        return rows


def _read_samples(rank: RankRecord, limit: ReadLimit, steps: Sequence[Step]) -> _SamplesFile:
    """Samples taken in the steps that were read, with their source lines and notes.

    If there are too many, those of every 2nd, 4th, 8th, ... second of the epoch are kept, the same seconds on all ranks.
    If there are still too many, the first ones are kept.
    """
    spans = _Spans(None if limit.numbers is None else steps)
    plausible_span = span_around([steps])
    read = _SamplesFile()
    most, count, misdated = _COLUMNS * limit.most_samples, 0, 0
    for record, _ in _records(rank, SAMPLES_FILE, limit, read.notes):
        if record.where is not None:
            _add_source_line(read.where, record)
            continue
        if not isinstance(record.time_ns, int):
            continue
        count += len(record.samples)
        if plausible_span is not None and not plausible_span[0] <= record.time_ns <= plausible_span[1]:
            misdated += len(record.samples)
        elif record.time_ns // _SECOND_NS % read.every_s == 0:
            read.burst_ns += record.looked_ns if spans.contains(record.time_ns) else 0
            _keep_samples(record, record.time_ns, record.samples, read.samples, spans)
            _keep_samples(record, record.time_ns, record.closer, read.burst_samples, spans)
            while len(read.samples) > most and read.every_s < _MAX_THINNING_S:
                read.every_s *= 2
                table = read.table(read.samples)
                read.samples = array("q", table[table[:, 0] // _SECOND_NS % read.every_s == 0].tobytes())
            del read.samples[most:]
            if len(read.burst_samples) > most:
                read.burst_samples, read.burst_ns = array("q"), 0
    if misdated:
        lost = f": {_LOST_INFORMATION[SAMPLES_FILE]}" if misdated == count else ""
        read.notes.append(
            f"{rank.path}/{SAMPLES_FILE}: {misdated} of {count} samples are dated more than a year away from this rank's steps and left "
            f"out{lost}."
        )
    return read


def _keep_samples(
    record: LogRecord, start_ns: int, rows: Sequence[Sequence[int]], kept: array[int], spans: _Spans
) -> None:
    """Appends the samples of a line that lie in the steps that were read."""
    for place, (offset_ns, *lines) in enumerate(rows):
        held_ns = record.held[place] if place < len(record.held) else 0
        if spans.contains(start_ns + offset_ns):
            kept.extend((start_ns + offset_ns, lines[0], lines[-1], held_ns))


def span_around(steps: Iterable[Sequence[Step]]) -> tuple[int, int] | None:
    """From a year before the first step of these ranks to a year after the last, epoch ns; None without steps. Samples outside
    this span were not taken in this run."""
    every = [step for of_rank in steps for step in of_rank]
    if not every:
        return None
    return min(step.start_ns for step in every) - _YEAR_NS, max(step.end_ns for step in every) + _YEAR_NS


def _add_source_line(places: dict[int, Where], record: LogRecord) -> None:
    if record.where is None or len(places) >= _MOST_PLACES:
        return
    caller = None if record.caller is None else places.get(record.caller)
    through = tuple(CodeLine(file, line or 0, function) for file, line, function in record.through)
    places[record.where] = msgspec.structs.replace(_line_of(record, caller), through=through)


def _line_of(line: LogRecord | WorkerLine, caller: Where | None) -> Where:
    callers = () if caller is None else caller.stack[:MOST_CALLERS]
    return Where(line.file, line.line or 0, line.function, callers=callers)


class _Spans:
    """Time spans of consecutive ``steps``, and the time after the last one, epoch ns. With None: all time."""

    def __init__(self, steps: Sequence[Step] | None) -> None:
        self._always = steps is None
        bounds = np.array([(step.start_ns, step.end_ns) for step in steps or ()], np.int64).reshape(-1, 2)
        self._starts, self._ends = (side.tolist() for side in union(bounds[:, 0], bounds[:, 1]))

    def contains(self, moment: int) -> bool:
        """Whether ``moment`` (epoch ns) is in one of the spans."""
        place = bisect_right(self._starts, moment) - 1
        return self._always or (place >= 0 and (moment < self._ends[place] or place == len(self._ends) - 1))


def _read_worker_logs(rank: RankRecord, notes: list[str]) -> tuple[WorkerLog, ...]:
    """One log per worker process. Broken lines are counted in ``notes``."""
    logs: dict[int, list[tuple[WorkerLine, list[WorkerSample]]]] = {}
    places: dict[tuple[int, int], Where] = {}
    loaders: dict[int, int] = {}
    for line, _ in _decoded_lines(
        rank, WORKERS_FILE, _first_bytes(rank.lines(WORKERS_FILE)), WorkerLine, notes
    ):
        if line.loader is not None:
            loaders.update(dict.fromkeys(line.processes, line.loader))
        elif line.process is not None and line.where is not None:
            caller = places.get((line.process, -1 if line.caller is None else line.caller))
            places[line.process, line.where] = _line_of(line, caller)
        elif line.process is not None and line.worker is not None:
            logs.setdefault(line.process, []).append((line, _worker_samples(line.process, line, places)))
    return tuple(_worker_log(loaders.get(pid), lines) for pid, lines in logs.items())


def _first_bytes(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines within the first ``_MOST_WORKER_BYTES``."""
    size = 0
    for line in lines:
        size += len(line)
        if size > _MOST_WORKER_BYTES:
            break
        yield line


def _worker_samples(pid: int, line: WorkerLine, places: dict[tuple[int, int], Where]) -> list[WorkerSample]:
    """The samples of a line whose source lines are known."""
    weight_ns = line.preparing_ns / max(1, len(line.samples))
    samples = []
    for place, (_, user, innermost, asleep) in enumerate(line.samples):
        own, inner = places.get((pid, user)), places.get((pid, innermost))
        if own is not None and inner is not None:
            waited_ns = line.held[place] if place < len(line.held) else 0
            samples.append(WorkerSample(own, inner, bool(asleep), waited_ns, weight_ns))
    return samples


def _worker_log(loader: int | None, read: list[tuple[WorkerLine, list[WorkerSample]]]) -> WorkerLog:
    lines = [line for line, _ in read]
    cpu = [line.cpu_ns for line in lines if line.cpu_ns is not None]
    delay = [line.run_delay_ns for line in lines if line.run_delay_ns is not None]
    sizes = [line.bytes for line in lines if line.bytes is not None]
    return WorkerLog(
        number=lines[0].worker or 0,
        loader=loader,
        batches=sum(line.batches for line in lines),
        preparing_ns=sum(line.preparing_ns for line in lines),
        squares_ms2=sum(line.squares_ms2 for line in lines),
        bytes=sum(sizes) if sizes else None,
        cpu_ns=sum(cpu) if cpu else None,
        run_delay_ns=sum(delay) if delay else None,
        span_ns=sum(max(0, end - begin) for begin, end in (line.span_ns for line in lines)),
        samples=tuple(sample for _, samples in read for sample in samples),
    )
