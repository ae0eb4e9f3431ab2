"""State of this host's ranks at each poll, from their heartbeats and progress documents in memory and from /proc.

Missing information means an unknown state: a rank that reports nothing does not necessarily hang.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from ddpdoctor.process import is_readable
from ddpdoctor.rundir.files import read_bounded, read_json
from ddpdoctor.rundir.heartbeat import Beat, HeartbeatReader
from ddpdoctor.rundir.layout import FAULTS_FILE, PROGRESS_FILE, parse_spool_name
from ddpdoctor.rundir.liveness import writer_of
from ddpdoctor.rundir.packages import says_gil_is_held
from ddpdoctor.rundir.spool import may_change_unseen, spools_in
from ddpdoctor.rundir.stepevents import OWN_PHASES, WAITING_PHASES, Phase, waits_for_others
from ddpdoctor.telemetry import procfs
from ddpdoctor.telemetry.host import Cgroup, OomKills
from ddpdoctor.telemetry.procfs import Meter

_SILENT_S = 5.0
"""Longest time between two reports of a responsive rank: its status thread wakes once a second, less often if processors are short."""
_BUSY_CORES = 0.2
"""A rank that uses fewer cores is idle; its polling threads use a few hundredths of a core."""
_METRICS_S = 30.0
"""Longest time between two uses of the model in an evaluation, for example to compute metrics of some batches."""
_MOST_FAULTS_BYTES = 1 << 20


def is_silent(since_s: float | None, now_s: float, most_s: float = 0.0) -> bool:
    """Whether the last report, at ``since_s`` (None: never), is longer ago than ``_SILENT_S`` and ``most_s``. Monotonic seconds."""
    return since_s is None or now_s - since_s > max(most_s, _SILENT_S)


class Activity(Enum):
    """Activity of a rank that has not finished a step for a while."""

    WAITS = "waits"
    """It reports that it waits for other ranks."""
    WORKS = "works"
    """It or its children move data or take memory; or it uses a processor and reports that it evaluates, saves, loads or compiles."""
    COMPUTES = "computes"
    """It uses a processor, and no other sign of progress is visible."""
    IDLE = "idle"
    """It does not wait for other ranks, and uses no resources. It answers, or a thread holds the GIL."""
    HELD = "held"
    """A person holds it: a debugger, SIGSTOP, a prompt."""
    UNKNOWN = "unknown"


@dataclass
class WatchedRank:
    """One recording of a rank on this host."""

    joined: ClassVar[bool] = True
    """Whether it has joined its process group."""
    spool: str
    rank: int
    pid: int
    """As recorded by the rank, in its own pid namespace."""
    began_ns: int = 0
    steps: int = 0
    """Finished steps; also the number of the step in progress."""
    last_step_ns: int | None = None
    ended: bool = False
    """Whether it has ended its recording or its process group since the last step, and has not joined another process group."""
    progress: dict[str, Any] = field(default_factory=dict)
    heard_s: float | None = None
    """When it last reported its position, monotonic seconds."""
    state: str = ""
    end: dict[str, Any] | None = None
    """Row for ``ends.json``; None while its process lives."""
    beat: Beat | None = None
    here_pid: int = -1
    """Its process id in this process's pid namespace; 0 if it is not visible from here."""
    _evaluated_s: float | None = None
    handle: int = -1
    """The pidfd, readable once the process has ended; -1 if there is none."""
    unmetered_s: float = 0.0
    """Time after a finished step in which its use of resources is not read: the kernel takes a ms to list the threads of a rank."""
    _stepped_s: float = -1e9
    """When a finished step was last seen, monotonic seconds."""
    _polled_s: float = 0.0
    _ran_python_s: float = 0.0
    """When Python code last ran in it, or when that could not be observed (it was suspended, or not polled); monotonic seconds."""
    _is_asked_for_stack: bool = False
    """Whether a stack was requested from faulthandler since then."""

    def __post_init__(self) -> None:
        self._heart = HeartbeatReader(self.spool)
        self._is_complete = False
        """Whether its process has ended, and its heartbeat was read after that."""
        self._faults = ""
        if self.here_pid < 0:
            self.here_pid = self.pid
        self.meter = Meter(self.here_pid)

    def open(self) -> None:
        """Open a pidfd, which becomes readable when the process ends."""
        self.here_pid = self._found_pid()
        self.meter = Meter(self.here_pid)
        if not self.here_pid:
            return
        try:
            self.handle = os.pidfd_open(self.here_pid)
        except OSError:
            self.handle = -1
            if procfs.is_gone(self.here_pid):
                self.note_end()

    def _found_pid(self) -> int:
        return writer_of(self.spool).pid

    def follow(self, earlier: WatchedRank) -> None:
        """Take over the pidfd and the end of ``earlier``, the same process before ``init_process_group``, which may have its exit code."""
        self.here_pid, self.handle, earlier.handle = earlier.here_pid, earlier.handle, -1
        self.meter = Meter(self.here_pid)
        if earlier.end is not None:
            self.end = {**earlier.end, "joined": True}

    def close(self) -> None:
        """Close the pidfd."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1

    @property
    def alive(self) -> bool:
        return self.end is None

    @property
    def ended_well(self) -> bool:
        """Whether its process has ended in order, without a signal, and with exit code 0 or an unknown one."""
        end = self.end
        return end is not None and end["in_order"] and end["signal"] is None and not end["code"]

    @property
    def key(self) -> tuple[int, int]:
        """Rank and process id. Process ids alone are ambiguous: each is from the rank's own pid namespace."""
        return self.rank, self.pid

    def update(self) -> bool:
        """Update the state. Returns whether a step was finished since the last poll."""
        if self._is_complete:
            return False
        before, beat = self.beat, self._heart.read() if self.joined else None
        self.beat = beat
        stepped = beat is not None and beat.steps > self.steps
        now_s, polled_s = time.monotonic(), self._polled_s
        self._polled_s = now_s
        if stepped:
            self._stepped_s = now_s
        if stepped or is_silent(polled_s, now_s):
            self._python_has_run(now_s)
        if beat is not None:
            self.began_ns, self.steps, self.ended = beat.began_ns, beat.steps, beat.in_order
            self.last_step_ns = beat.step_end_ns or None
        if self.end is not None:
            # The last heartbeat is read after the process has ended.
            self.end["step"] = self.steps
            self.end["in_order"] = self.end["in_order"] or self.ended
            self._heart.close()
            self._is_complete = beat is not None
        elif stepped and self.handle >= 0:
            # The rank makes progress, and the pidfd shows its end, so nothing else is read.
            self.state, self.progress, self.heard_s = "", {}, None
            self.meter.clear()
        else:
            self._read_process()
            self._read_report(before, beat)
            if self.suspended or self.state == "t":
                self._python_has_run(now_s)
        return stepped

    def _python_has_run(self, now_s: float) -> None:
        self._ran_python_s, self._is_asked_for_stack = now_s, False

    def ask_stack(self, after_s: float) -> None:
        """Have faulthandler write the stack of its first thread, once, if Python has not run in it for ``after_s``. Not while it is
        stopped or in a system call that a signal interrupts, nor if the job has replaced the signal's handler."""
        if self._is_asked_for_stack or not is_silent(self._ran_python_s, self._polled_s, after_s):
            return
        number = 0 if self.beat is None or self.beat.in_order else self.beat.signal
        if number <= 0 or not self.alive or not self.here_pid or self.suspended or self.attended:
            return
        if not procfs.catches(self.here_pid, number) or procfs.is_interruptible(self.here_pid, sleeps=True):
            return
        self._is_asked_for_stack = True
        if self.handle >= 0:
            with suppress(OSError):  # the process is gone
                signal.pidfd_send_signal(self.handle, number)

    def _read_process(self) -> None:
        if not self.here_pid:
            self.open()  # the process was not visible when the recording was found
        if not self.here_pid or self.end is not None:
            return
        self.state = procfs.state_of(self.here_pid)
        if self.state in ("", "Z", "X") and self._has_ended():
            self.note_end()
        elif self.state and self._polled_s - self._stepped_s >= self.unmetered_s:
            self.meter.update(self.beat)

    def _has_ended(self) -> bool:
        """Whether its process has ended. A file in /proc that cannot be read, for example for lack of descriptors, does not prove that."""
        if self.handle >= 0:
            return is_readable(self.handle, 0)
        return self.state in ("Z", "X") or procfs.is_gone(self.here_pid)

    def _read_report(self, before: Beat | None, beat: Beat | None) -> None:
        if before is not None and beat is not None and beat.reports > before.reports:
            self.heard_s = time.monotonic()
            self._python_has_run(self.heard_s)
            self.progress = read_json(str(Path(self.spool) / PROGRESS_FILE), []) or {}
        self._faults = "" if self.reports else self._read_faults()

    def _read_faults(self) -> str:
        file = str(Path(self.spool) / FAULTS_FILE)
        with suppress(OSError):
            return read_bounded(file, _MOST_FAULTS_BYTES).decode(errors="replace")
        return ""

    def note_end(self) -> None:
        """Record the end of the process."""
        if not self.alive:
            return
        status = procfs.exit_status(self.here_pid, self.handle)
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
    def counts(self) -> bool:
        """Whether its step count is visible; it is also if its spool is full or gone."""
        return self.beat is not None

    @property
    def reports(self) -> bool:
        """Whether it has reported its position within ``_SILENT_S``."""
        return not is_silent(self.heard_s, time.monotonic())

    @property
    def faults(self) -> str:
        """Stacks that faulthandler wrote; empty while the rank reports its position."""
        return self._faults

    @property
    def holds_gil(self) -> bool:
        """Whether a thread holds the GIL: the rank does not answer, and faulthandler has written its stacks."""
        return not self.reports and says_gil_is_held(self.faults)

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the job, as it reports it; None if it has not."""
        size = self.progress.get("world_size")
        return size if isinstance(size, int) else None

    @property
    def phase(self) -> str:
        """The phase that it reports; "" if it does not report."""
        return self.reported("phase")

    def reported(self, name: str) -> str:
        """A text of its report, by name; "" if it does not report."""
        text = self.progress.get(name)
        return text if self.reports and isinstance(text, str) else ""

    @property
    def waits(self) -> bool:
        """Whether it reports that it waits for other ranks."""
        groups = self.progress.get("groups")
        backward = self.phase == Phase.BACKWARD and not groups and not self.busy
        return self.reports and (backward or waits_for_others(self.phase, groups))

    @property
    def waits_in_call(self) -> bool:
        """Whether it reports a phase that waits, such as a collective called from Python; counts of its process groups do not suffice."""
        return self.reports and self.phase in WAITING_PHASES

    @property
    def counts_collectives(self) -> bool:
        """Whether torch counts its collectives, so that a wait on the device is visible."""
        return bool(self.progress.get("groups"))

    @property
    def busy(self) -> bool:
        """Whether it uses a processor, or is runnable."""
        return self.meter.cores >= _BUSY_CORES or self.state == "R"

    @property
    def sleeps(self) -> bool:
        """Whether its first thread sleeps for a set time."""
        return bool(self.here_pid) and procfs.sleeps(self.here_pid)

    @property
    def waits_for_own_thread(self) -> bool:
        """Whether its first thread is known to wait for a lock or for another thread, of which none sleeps for a set time."""
        return bool(self.here_pid) and procfs.waits_for_own_thread(self.here_pid)

    @property
    def suspended(self) -> bool:
        """Whether it is stopped (SIGSTOP)."""
        return self.alive and self.state == "T"

    @property
    def attended(self) -> bool:
        """Whether a debugger is attached, or it waits for terminal input."""
        return (self.alive and self.here_pid != 0) and (
            self.state == "t"
            or self.phase == Phase.DEBUGGER
            or procfs.tracer_of(self.here_pid) != 0
            or procfs.waits_for_input(self.here_pid, self.reported("syscall"))
        )

    @property
    def activity(self) -> Activity:
        """What it does at this poll."""
        if self.suspended or self.attended:
            return Activity.HELD
        if self.waits:
            return Activity.WAITS
        is_in_long_phase = self.phase in (Phase.SAVE, Phase.LOAD, Phase.COMPILE)
        if self.meter.moves or (self.busy and (self._evaluates() or is_in_long_phase)):
            return Activity.WORKS
        if not (self.is_known or self.holds_gil):
            return Activity.UNKNOWN
        return Activity.COMPUTES if self.busy else Activity.IDLE

    @property
    def computes(self) -> bool:
        """Whether it may be in a long computation: it uses a processor, and is not unresponsive because a thread holds the GIL."""
        return self.activity is Activity.COMPUTES and not self.holds_gil

    @property
    def is_known(self) -> bool:
        """Whether enough is visible to conclude that it is idle."""
        return bool(self.here_pid and self.state) and self.counts and self.reports

    @property
    def alone(self) -> bool:
        """Whether it works without the other ranks, by its report or by the kernel's counters."""
        return self.activity in (Activity.WORKS, Activity.COMPUTES) or self.phase in OWN_PHASES

    def _evaluates(self) -> bool:
        """Whether its models are in evaluation mode and were used within ``_METRICS_S``."""
        if not self.progress.get("evaluating"):
            self._evaluated_s = None
            return False
        if self._evaluated_s is None or self.phase in (Phase.EVALUATION, Phase.DATA):
            self._evaluated_s = time.monotonic()
        return time.monotonic() - self._evaluated_s < _METRICS_S

    @property
    def signs(self) -> tuple[Any, ...]:
        """Values that change while it makes progress within a step."""
        if not self.reports:
            return ()
        groups = self.progress.get("groups")
        known = groups if isinstance(groups, dict) else {}
        enqueued = sorted((name, numbers[:1]) for name, numbers in known.items())
        return self.progress.get("events"), self.progress.get("evaluations"), str(enqueued)

    def where(self) -> str:
        """Its current line of the job's own code, as text; "" if unknown."""
        for key in ("user", "frames"):
            frames = self.progress.get(key)
            if isinstance(frames, list) and frames and isinstance(frames[0], list) and len(frames[0]) == 3:
                file, line, function = frames[0]
                return f"{Path(str(file)).name}:{line} ({str(function)[:60]})"
        return ""


_SEARCH_PERIOD_S = 0.1
"""Time between two searches for new ranks. The exit code of a rank that ends before it is found is unknown."""


class HostWatchedRanks:
    """All recordings of ranks on this host, found when they begin, and the ends of their processes."""

    def __init__(self, root: str, unmetered_s: float = 0.0) -> None:
        self._root, self._unmetered_s = root, unmetered_s
        self._listed_ns = 0
        """Modification time of the root when it was last listed, ns."""
        self.known: dict[str, WatchedRank] = {}
        self._groups: dict[Path, OomKills] = {}
        """By the group's folder, the OOM kills in each control group of ranks."""
        self._group_of: dict[str, tuple[OomKills, int]] = {}
        """By spool, the control group of the rank, and the group's number of OOM kills when the rank was found."""

    def wait(self, seconds: float, handles: list[int]) -> None:
        """Wait up to ``seconds`` until a process ends, a descriptor in ``handles`` is readable, or a rank begins to record."""
        ends_s = time.monotonic() + seconds
        with selectors.PollSelector() as selector:
            for rank in self.known.values():
                if rank.handle >= 0:
                    selector.register(rank.handle, selectors.EVENT_READ, rank)
            for handle in handles:
                selector.register(handle, selectors.EVENT_READ)
            ready: list[tuple[selectors.SelectorKey, int]] = []
            search_s = seconds if self._all_train else _SEARCH_PERIOD_S
            while not ready and self._listed_ns == self._modified_ns() and time.monotonic() < ends_s:
                ready = selector.select(min(max(0.0, ends_s - time.monotonic()), search_s))
            for key, _ in ready:
                if key.data is not None:
                    key.data.note_end()

    @property
    def _all_train(self) -> bool:
        """Whether all ranks of the attempt train, and their ends are visible at once: then no other rank is about to begin."""
        living = [rank for rank in self.known.values() if rank.alive]
        return bool(living) and all(rank.steps and rank.handle >= 0 for rank in living)

    def _modified_ns(self) -> int:
        with suppress(OSError):
            return Path(self._root).stat().st_mtime_ns
        return 0

    def update(self, earlier: Callable[[int, int], WatchedRank | None] | None = None) -> bool:
        """Update all ranks, see also :meth:`find`. Returns whether one has finished a step."""
        self.find(earlier)
        stepped = [rank.update() for rank in self.known.values()]
        for kills in self._groups.values():
            kills.update()
        for spool, rank in self.known.items():
            if rank.end is not None and rank.end["oom_kills"] is None and spool in self._group_of:
                kills, began = self._group_of[spool]
                rank.end["oom_kills"] = kills.recent(began)
        return any(stepped)

    def find(self, earlier: Callable[[int, int], WatchedRank | None] | None = None) -> None:
        """Find new recordings, and open their processes. ``earlier(rank, pid)`` returns the same process if it was known before
        ``init_process_group``."""
        modified_ns = self._modified_ns()
        if modified_ns == self._listed_ns and not may_change_unseen(modified_ns):
            return
        self._listed_ns = modified_ns
        for spool in spools_in(self._root):
            if spool not in self.known and (named := parse_spool_name(spool)) is not None:
                found = WatchedRank(spool, *named, unmetered_s=self._unmetered_s)
                before = None if earlier is None else earlier(found.rank, found.pid)
                if before is None:
                    found.open()
                else:
                    found.follow(before)
                self._find_group(found)
                self.known[spool] = found

    def _find_group(self, rank: WatchedRank) -> None:
        group = Cgroup(Path(f"/proc/{rank.here_pid}"))
        if group.memory_folder is not None and group.oom_kills() is not None:
            kills = self._groups.setdefault(group.memory_folder, OomKills(group))
            kills.update()
            self._group_of[rank.spool] = kills, kills.total

    def ends(self, unjoined: list[dict[str, Any]], started_ns: int = 0) -> dict[str, Any]:
        """Content of ``ends.json``: the ends of these ranks and of ``unjoined``, and the OOM kills at the ends of the current attempt.
        ``started_ns``: see :meth:`current`."""
        ends = [*(rank.end for rank in self.known.values() if rank.end is not None), *unjoined]
        current = self.current(started_ns) if ends else []
        began_ns = max((rank.began_ns for rank in current), default=started_ns)
        of_attempt = [rank.end for rank in current if rank.end is not None]
        for row in unjoined:
            if row["oom_kills"] is None:
                row["oom_kills"] = max((kills.recent() for kills in self._groups.values()), default=None)
            of_attempt += [row] if row["seen_ns"] >= began_ns else []
        counts = [row["oom_kills"] for row in of_attempt if row["oom_kills"] is not None]
        return {"ends": ends, "oom_kills": max(counts, default=None)}

    def current(self, started_ns: int = 0) -> list[WatchedRank]:
        """The running or newest recording of each rank, sorted by rank, without earlier attempts, which ended before a rank of this attempt
        began. ``started_ns``: start of the newest rank before ``init_process_group``."""
        newest: dict[int, WatchedRank] = {}
        for rank in self.known.values():
            if rank.alive or rank.rank not in newest or not newest[rank.rank].alive:
                newest[rank.rank] = rank
        begun_ns = max([started_ns, *(rank.began_ns for rank in newest.values() if rank.alive)])
        of_this_attempt = [
            rank for rank in newest.values() if rank.end is None or rank.end["seen_ns"] >= begun_ns
        ]
        return sorted(of_this_attempt, key=lambda rank: rank.rank)
