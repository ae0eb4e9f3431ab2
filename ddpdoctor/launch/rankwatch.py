"""The ranks of this host as their spools and the kernel show them, from one look to the next. Reads memory and /proc only."""

from __future__ import annotations

import os
import re
import select
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ddpdoctor.launch import procfs
from ddpdoctor.rundir import (
    LONG_PHASES,
    PROGRESS_FILE,
    STEPS_FILE,
    WAITING_PHASES,
    LineField,
    Phase,
    newer_in,
    read_json,
    spools_in,
)
from ddpdoctor.rundir.layout import parse_rank_directory
from ddpdoctor.telemetry.cgroup import Cgroup

_STEP = re.compile(
    rb"^\{%b([0-9]{1,15})%b\[([0-9]{1,19}),([0-9]{1,19})\]"
    % (LineField.STEP.key.encode(), LineField.TIME_NS.next_key.encode()),
    re.MULTILINE,
)
_END = f"{{{LineField.END.key}true".encode()
_OWN = LONG_PHASES | {Phase.DATA}
"""Phases in which a rank is with itself, whatever collectives it has on their way."""
_FRESH_S = 5.0
"""A rank that has not said where it is for so long does not answer: it does so once a second."""
_BUSY_CORES = 0.2
"""One that uses less sleeps: threads that look around in intervals take a few hundredths."""
_METRICS_S = 30.0
"""What an evaluation does between two uses of the model: metrics of a batch, or of some."""
_MOVING_BYTES_PER_S = 64 << 10
"""What a rank reads and writes beyond logs when it makes a checkpoint, be it to slow storage."""


@dataclass
class WatchedRank:
    """One recording of a rank on this host."""

    joined: ClassVar[bool] = True
    """Whether it has joined its process group."""
    spool: str
    rank: int
    pid: int
    steps: int = 0
    """Finished so far; the number of the step in progress."""
    last_step_ns: int | None = None
    ended: bool = False
    """Whether it has ended its recording, or its process group, since the last step."""
    progress: dict[str, Any] = field(default_factory=dict)
    state: str = ""
    cores: float = 0.0
    """Used by its process between the last two looks."""
    moved_bytes_per_s: float = 0.0
    """Read and written by it, likewise."""
    end: dict[str, Any] | None = None
    """What is known of its process's end; None while it lives."""
    _evaluated_s: float | None = None
    _done: int = 0
    _handle: int = -1
    _last: tuple[float, float, int] = (0.0, 0.0, 0)

    def open(self) -> None:
        """Have the kernel tell the process's end at once."""
        try:
            self._handle = os.pidfd_open(self.pid)
        except OSError:
            self._handle = -1
            if not procfs.state_of(self.pid):
                self._note_end()

    def close(self) -> None:
        """Nobody asks for it any more."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    @property
    def alive(self) -> bool:
        return self.end is None

    @property
    def handle(self) -> int:
        """Readable once the process has ended; -1 where nobody tells."""
        return self._handle

    @property
    def in_long_phase(self) -> bool:
        """Whether it is in one that takes long in a healthy job too, whether or not anything shows that it gets on."""
        return self.phase in LONG_PHASES

    def look(self) -> bool:
        """Bring all up to date; whether a step was finished since the last look."""
        data, self._done = newer_in(self.spool, STEPS_FILE, self._done)
        found = list(_STEP.finditer(data))
        if found:
            self.steps, self.last_step_ns = int(found[-1][1]) + 1, int(found[-1][3])
            self.ended = False
        if data.rfind(_END) > (found[-1].start() if found else -1):
            self.ended = True
        if self.end is not None:
            # What it wrote last is read after its process has ended.
            self.end["step"] = self.steps
            self.end["in_order"] = self.end["in_order"] or self.ended
        elif found and self._handle >= 0:
            # It gets on, and its end will be told: nothing else is asked for, once a second, all along the job.
            self.state, self.progress, self._last = "", {}, (0.0, 0.0, 0)
        else:
            self._look_at_process()
        return bool(found)

    def _look_at_process(self) -> None:
        self.state = procfs.state_of(self.pid)
        if self.state in ("", "Z", "X"):
            self._note_end()
            return
        now_s, io = time.monotonic(), procfs.io_counts(self.pid)
        current = now_s, procfs.cpu_s(self.pid), io.get("read_chars", 0) + io.get("written_chars", 0)
        before, self._last = self._last, current
        passed_s = now_s - before[0]
        if before[0] and passed_s > 0:
            self.cores = (current[1] - before[1]) / passed_s
            self.moved_bytes_per_s = (current[2] - before[2]) / passed_s
        document = read_json(str(Path(self.spool) / PROGRESS_FILE), [])
        self.progress = document or {}

    def note_end(self) -> None:
        """Its process has ended, as its handle says."""
        if self.alive:
            self._note_end()

    def _note_end(self) -> None:
        status = procfs.exit_status(self.pid, self._handle)
        code = None if status is None else os.waitstatus_to_exitcode(status)
        self.end = {
            "rank": self.rank,
            "pid": self.pid,
            "seen_ns": time.time_ns(),
            "code": code if code is not None and code >= 0 else None,
            "signal": -code if code is not None and code < 0 else None,
            "in_order": self.ended or code == 0,
            "step": self.steps,
            "oom_kills": None,
        }
        self.close()

    @property
    def answers(self) -> bool:
        """Whether it says where it is."""
        at_ns = self.progress.get("at_ns")
        return isinstance(at_ns, int) and time.time_ns() - at_ns < _FRESH_S * 1e9

    @property
    def phase(self) -> str:
        """In which it says it is; "" where it does not answer."""
        phase = self.progress.get("phase")
        return phase if self.answers and isinstance(phase, str) else ""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, as far as it answers."""
        if not self.answers or self.phase in _OWN:
            return False
        groups = self.progress.get("groups")
        if isinstance(groups, dict) and any(map(_has_open, groups.values())):
            return True
        return self.phase in WAITING_PHASES or (self.phase == Phase.BACKWARD and not groups and not self.busy)

    @property
    def busy(self) -> bool:
        """Whether it computes, or would if it got a processor."""
        return self.cores >= _BUSY_CORES or self.state == "R"

    @property
    def moves(self) -> bool:
        """Whether it reads or writes more than logs."""
        return self.moved_bytes_per_s >= _MOVING_BYTES_PER_S

    @property
    def works(self) -> bool:
        """Whether it does something of its own, as far as it says so or the kernel sees it."""
        return not self.waits and (self.busy or self.moves or self.phase in _OWN)

    @property
    def suspended(self) -> bool:
        """Whether somebody has stopped it."""
        return self.alive and self.state == "T"

    @property
    def debugged(self) -> bool:
        """Whether somebody looks into it with a debugger."""
        return self.alive and (
            self.state == "t" or self.phase == Phase.DEBUGGER or procfs.tracer_of(self.pid) != 0
        )

    @property
    def works_in(self) -> str | None:
        """The phase, other than a step's usual ones, in which it gets on; None where it does not."""
        if not self.alive or self.waits:
            return None
        if self.phase in (Phase.SAVE, Phase.LOAD) and (self.moves or self.busy):
            return self.phase
        if self.phase == Phase.COMPILE and self.busy:
            return self.phase
        return Phase.EVALUATION.value if self._evaluates() and (self.moves or self.busy) else None

    def _evaluates(self) -> bool:
        """Whether its models are in evaluation mode, and were used in it not long ago."""
        if not self.progress.get("evaluating"):
            self._evaluated_s = None
            return False
        if self._evaluated_s is None or self.phase in (Phase.EVALUATION, Phase.DATA):
            self._evaluated_s = time.monotonic()
        return time.monotonic() - self._evaluated_s < _METRICS_S

    @property
    def signs(self) -> tuple[Any, ...]:
        """What changes while it gets on within a step."""
        if not self.answers:
            return ()
        groups = self.progress.get("groups")
        enqueued = (
            sorted((name, numbers[:1]) for name, numbers in groups.items())
            if isinstance(groups, dict)
            else []
        )
        return self.progress.get("events"), self.progress.get("evaluations"), str(enqueued)

    def where(self) -> str:
        """The line of the job's own code at which it is, in words; "" where it does not say."""
        for key in ("user", "frames"):
            frames = self.progress.get(key)
            if isinstance(frames, list) and frames and isinstance(frames[0], list) and len(frames[0]) == 3:
                file, line, function = frames[0]
                return f"{Path(str(file)).name}:{line} ({str(function)[:60]})"
        return ""


def _has_open(numbers: Any) -> bool:
    """Whether a collective of a group was enqueued that is not complete."""
    return (
        isinstance(numbers, list)
        and len(numbers) == 3
        and all(isinstance(number, int) for number in numbers)
        and numbers[0] > max(numbers[2], 0)
    )


class HostWatchedRanks:
    """All of them, found as they appear."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.known: dict[str, WatchedRank] = {}
        self._groups: dict[str, tuple[Cgroup, int]] = {}
        """Of each, its control group, and how often that had been short of memory when the rank was found."""

    def wait(self, seconds: float, also: list[int]) -> None:
        """Until something happens to a process, or in ``also``, at most for so long."""
        handles = {rank.handle: rank for rank in self.known.values() if rank.handle >= 0}
        ready, _, _ = select.select([*handles, *also], [], [], seconds)
        for handle in ready:
            if handle in handles:
                handles[handle].note_end()

    def look(self) -> bool:
        """Whether a step was finished by one of them."""
        for spool in spools_in(self._root):
            if spool not in self.known and (found := _watched(spool)) is not None:
                group = Cgroup(Path(f"/proc/{found.pid}"))
                if (kills := group.oom_kills()) is not None:
                    self._groups[spool] = group, kills
                found.open()
                self.known[spool] = found
        stepped = [rank.look() for rank in self.known.values()]
        for spool, rank in self.known.items():
            if rank.end is not None and rank.end["oom_kills"] is None:
                rank.end["oom_kills"] = self._kills(spool)
        return any(stepped)

    def _kills(self, spool: str) -> int | None:
        if spool not in self._groups:
            return None
        group, before = self._groups[spool]
        now = group.oom_kills()
        return None if now is None else now - before

    def ends(self) -> dict[str, Any]:
        """How those ended that have."""
        kills = [found for spool in self.known if (found := self._kills(spool)) is not None]
        return {
            "ends": [rank.end for rank in self.known.values() if rank.end is not None],
            "oom_kills": max(kills, default=None),
        }

    def current(self) -> list[WatchedRank]:
        """Of each rank the living or newest recording, by rank."""
        newest: dict[int, WatchedRank] = {}
        for rank in self.known.values():
            if rank.alive or rank.rank not in newest or not newest[rank.rank].alive:
                newest[rank.rank] = rank
        return [newest[number] for number in sorted(newest)]


def _watched(spool: str) -> WatchedRank | None:
    name, _, pid = Path(spool).name.rpartition("-")
    place = parse_rank_directory(name)
    if place is None or not pid.isdecimal() or len(pid) > 9:
        return None
    return WatchedRank(spool, place[0], int(pid))
