"""Step logs of a run directory, one per rank, as typed records with absolute times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ddpdoctor.rundir import SAMPLES_FILE, STEPS_FILE, RankRecord

from .facts import Where

_MOST_STEPS = 60_000
"""Step records read of one rank; a longer log is read up to its end but kept only every n-th block."""


class Event(msgspec.Struct):
    """Something that happened in a step; ``start_ns`` is epoch ns once :func:`read_rank_log` is through with
    it."""

    k: str
    s: int
    d: int
    w: int = -1
    l: int = -1  # noqa: E741
    n: int = -1
    q: int = -1
    end: bool = False
    m: int = -1
    it: int = -1
    sync: bool | None = None
    ready: list[int] = []
    base: int | None = None
    o: int = -1
    op: str = ""
    pg: str = ""
    b: float | None = None
    seq: int = -1
    is_async: bool = msgspec.field(default=False, name="async")
    p2p: bool = False
    src: int | None = None
    dst: int | None = None

    @property
    def stop(self) -> int:
        """End, in the unit and origin of ``s``."""
        return self.s + self.d


class Stamps(msgspec.Struct):
    """DDP's own stamps of one iteration, epoch ns; 0 where absent."""

    ddp: int
    it: int
    fs: int = 0
    cs: int = 0
    ce: int = 0
    ms: int = 0
    me: int = 0


class _Line(msgspec.Struct):
    """Any line of steps.jsonl or samples.jsonl."""

    step: int | None = None
    t: list[int] | int | None = None
    ev: list[Event] = []
    marks: list[str] = []
    runq: int | None = None
    cpu: int | None = None
    csw: list[int] | None = None
    self: int = 0
    ddp: int | None = None
    it: int = -1
    fs: int = 0
    cs: int = 0
    ce: int = 0
    ms: int = 0
    me: int = 0
    where: int | None = None
    file: str = ""
    line: int = 0
    function: str = ""
    note: str | None = None
    s: list[list[int]] = []


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


@dataclass
class RankLog:
    """What one rank's hook recorded."""

    rank: int
    record: RankRecord
    steps: list[Step] = field(default_factory=list)
    stamps: dict[tuple[int, int], Stamps] = field(default_factory=dict)
    """By (DDP module, iteration)."""
    where: dict[int, Where] = field(default_factory=dict)
    samples: list[tuple[int, int, int]] = field(default_factory=list)
    """(epoch ns, user line, innermost line), ids into ``sample_where``."""
    sample_where: dict[int, Where] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def host(self) -> str:
        """Host name."""
        return self.record.host

    def shift_stamps(self, offset_ns: int) -> None:
        """Move DDP's stamps and the samples by ``offset_ns``, onto the common clock."""
        for stamps in self.stamps.values():
            for name in ("fs", "cs", "ce", "ms", "me"):
                if getattr(stamps, name):
                    setattr(stamps, name, getattr(stamps, name) + offset_ns)
        self.samples = [(t + offset_ns, user, leaf) for t, user, leaf in self.samples]


def _lines(path: Path, notes: list[str]) -> Iterator[_Line]:
    decode = msgspec.json.Decoder(_Line).decode
    broken = 0
    try:
        source = path.open("rb")
    except OSError:
        return
    with source:
        for line in source:
            if not line.endswith(b"\n"):
                break
            try:
                yield decode(line)
            except msgspec.MsgspecError:
                broken += 1
    if broken:
        notes.append(f"{path}: {broken} broken lines left out.")


def read_rank_log(record: RankRecord) -> RankLog:
    """Read steps.jsonl and samples.jsonl of one rank; broken lines are left out and noted."""
    log = RankLog(record.rank, record)
    for line in _lines(Path(record.path) / STEPS_FILE, log.notes):
        if line.step is not None and isinstance(line.t, list):
            log.steps.append(_step(line.step, line))
        elif line.ddp is not None:
            log.stamps[line.ddp, line.it] = Stamps(
                line.ddp, line.it, line.fs, line.cs, line.ce, line.ms, line.me
            )
        elif line.where is not None:
            log.where[line.where] = Where(line.file, line.line, line.function)
        elif line.note:
            log.notes.append(f"Rank {record.rank}: {line.note}")
    for line in _lines(Path(record.path) / SAMPLES_FILE, log.notes):
        if line.where is not None:
            log.sample_where[line.where] = Where(line.file, line.line, line.function)
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
        event.s += start
        if event.base is not None:
            event.base += start
    return Step(number, start, end, line.ev, tuple(line.marks), line.runq, line.cpu)


def _thin(steps: list[Step]) -> list[Step]:
    """Blocks of 500 neighbouring steps, evenly spread, so that rhythms stay visible."""
    block = 500
    keep = _MOST_STEPS // block
    starts = {round(i * (len(steps) - block) / (keep - 1)) // block * block for i in range(keep)}
    return [step for start in sorted(starts) for step in steps[start : start + block]]
