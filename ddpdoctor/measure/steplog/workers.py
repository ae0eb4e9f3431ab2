"""What the workers of a rank's data loaders recorded in ``workers.jsonl``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from ddpdoctor.measure.places import Where
from ddpdoctor.rundir import WORKERS_FILE, LineField, RankRecord, WorkerField, renamed
from ddpdoctor.rundir.files import broken_lines, unreadable

from .records import MOST_CALLERS, Duration, Epoch, Id, Number, Offset, Text

_MOST_BYTES = 4 << 20
"""Of a file that are read: the hook writes less than a quarter."""
_MOST_ENTRIES = 1 << 14
"""Of a list in one line; the hook writes far fewer samples at a time."""
_Process = Annotated[int, Meta(gt=0, lt=2**31)]
_Row = Annotated[tuple[Offset, Id, Id, Annotated[int, Meta(ge=0, le=1)]], Meta()]


class _Line(
    msgspec.Struct,
    rename=renamed(WorkerField)
    | {name: renamed(LineField)[name] for name in ("where", "file", "line", "function", "caller")},
):
    """A line of any kind."""

    process: _Process | None = None
    worker: Number | None = None
    workers: Number = 1
    span_ns: tuple[Epoch, Epoch] = (0, 0)
    batches: Number = 0
    preparing_ns: Duration = 0
    squares_ms2: Annotated[float, Meta(ge=0, le=2.0**80)] = 0.0
    cpu_ns: Duration | None = None
    run_delay_ns: Duration | None = None
    samples: Annotated[tuple[_Row, ...], Meta(max_length=_MOST_ENTRIES)] = ()
    held: Annotated[tuple[Duration, ...], Meta(max_length=_MOST_ENTRIES)] = ()
    loader: Id | None = None
    processes: Annotated[tuple[_Process, ...], Meta(max_length=_MOST_ENTRIES)] = ()
    where: Id | None = None
    file: Text = ""
    line: Id | None = 0
    function: Text = ""
    caller: Id | None = None


class WorkerSample(msgspec.Struct, frozen=True, gc=False):
    """Where a worker was while it prepared a batch."""

    user: Where
    """The user's innermost line; without any, of a library or torch."""
    innermost: Where
    asleep: bool
    """Whether it waited, and neither computed nor was ready to."""
    waited_ns: int
    """For how long the sampling thread waited for the GIL, 0 below :data:`ddpdoctor.rundir.HELD_NS`."""
    weight_ns: float
    """The part of the time of preparing batches that it stands for."""


class WorkerLog(msgspec.Struct, frozen=True):
    """What one process did as a worker, but for its first batch."""

    number: int
    """Number of the worker in its loader."""
    workers: int
    """Number of workers of its loader."""
    loader: int | None
    """Id of that; None where it began before the recording."""
    batches: int
    preparing_ns: int
    """For how long it prepared them."""
    squares_ms2: float
    """Sum of the squares of the times of the batches, ms²."""
    cpu_ns: int | None
    run_delay_ns: int | None
    """Of that time: on a CPU, and ready to run without one; None where unknown."""
    span_ns: int
    """For how long it was recorded."""
    samples: tuple[WorkerSample, ...]


def read_worker_logs(rank: RankRecord, notes: list[str]) -> tuple[WorkerLog, ...]:
    """One log for each process; none where none was recorded. What is broken is counted in ``notes``."""
    logs: dict[int, list[tuple[_Line, list[WorkerSample]]]] = {}
    places: dict[tuple[int, int], Where] = {}
    loaders: dict[int, int] = {}
    for line in _lines(rank, notes):
        if line.loader is not None:
            loaders.update(dict.fromkeys(line.processes, line.loader))
        elif line.process is not None and line.where is not None:
            caller = places.get((line.process, -1 if line.caller is None else line.caller))
            callers = () if caller is None else caller.stack[:MOST_CALLERS]
            places[line.process, line.where] = Where(
                line.file, line.line or 0, line.function, callers=callers
            )
        elif line.process is not None and line.worker is not None:
            logs.setdefault(line.process, []).append((line, _samples(line.process, line, places)))
    return tuple(_of_process(loaders.get(pid), lines) for pid, lines in logs.items())


def _lines(rank: RankRecord, notes: list[str]) -> Iterator[_Line]:
    decode = msgspec.json.Decoder(_Line).decode
    path, broken, size = f"{rank.path}/{WORKERS_FILE}", 0, 0
    try:
        for line in rank.lines(WORKERS_FILE):
            size += len(line)
            if size > _MOST_BYTES:
                break
            try:
                yield decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                broken += 1
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(unreadable(path, error, "what the workers of its data loaders did is not known").text)
    if broken:
        notes.append(broken_lines(path, broken).text)


def _samples(pid: int, line: _Line, places: dict[tuple[int, int], Where]) -> list[WorkerSample]:
    """The samples of a line whose places are known."""
    weight_ns = line.preparing_ns / max(1, len(line.samples))
    samples = []
    for place, (_, user, innermost, asleep) in enumerate(line.samples):
        own, inner = places.get((pid, user)), places.get((pid, innermost))
        if own is not None and inner is not None:
            waited_ns = line.held[place] if place < len(line.held) else 0
            samples.append(WorkerSample(own, inner, bool(asleep), waited_ns, weight_ns))
    return samples


def _of_process(loader: int | None, read: list[tuple[_Line, list[WorkerSample]]]) -> WorkerLog:
    lines = [line for line, _ in read]
    cpu = [line.cpu_ns for line in lines if line.cpu_ns is not None]
    delay = [line.run_delay_ns for line in lines if line.run_delay_ns is not None]
    return WorkerLog(
        number=lines[0].worker or 0,
        workers=lines[0].workers,
        loader=loader,
        batches=sum(line.batches for line in lines),
        preparing_ns=sum(line.preparing_ns for line in lines),
        squares_ms2=sum(line.squares_ms2 for line in lines),
        cpu_ns=sum(cpu) if cpu else None,
        run_delay_ns=sum(delay) if delay else None,
        span_ns=sum(max(0, end - begin) for begin, end in (line.span_ns for line in lines)),
        samples=tuple(sample for _, samples in read for sample in samples),
    )
