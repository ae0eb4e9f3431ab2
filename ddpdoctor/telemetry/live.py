"""Reads a run directory while its job runs, for ``ddpdoctor watch`` and the Prometheus exporter.

Each refresh continues at the position in each file at which the last one ended, so its cost does not grow with the run.
"""

from __future__ import annotations

import bisect
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ddpdoctor.rundir.compaction import stream_shift
from ddpdoctor.rundir.files import folders_in, parsed, reading
from ddpdoctor.rundir.layout import STEPS_FILE, TELEMETRY_FILE, parse_rank_directory
from ddpdoctor.rundir.reader import read_manifest, read_rank
from ddpdoctor.rundir.requests import launcher_runs, living_ranks
from ddpdoctor.rundir.stepevents import EventField, EventKind, LineField, renamed
from ddpdoctor.rundir.typed import TELEMETRY_SAMPLE, fitting, is_moment

KEPT_STEPS = 200
"""Number of newest steps kept for each rank."""
KEPT_FULL = 128
"""Number of newest steps recorded in full that are kept for each rank. Enough that ranks whose logs are thinned by different powers of two
have some of them in common."""
RECENT_STEPS = 20
"""Number of newest steps for medians."""
_SILENT_S, _SILENT_STEPS = 10.0, 10
"""``watch`` warns if no step was finished for this many seconds and this many times the usual step time."""

_CLASSES_PER_DOUBLING = 50
"""Number of histogram classes of step times per factor of two."""
LOOK_BYTES = 8 << 20
"""Most bytes of a file read per refresh. Of a longer backlog, for example at the first refresh, only the end is read."""


_Nanoseconds = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]


class LivePhase(str, Enum):
    """Phase of the training thread, from the events of its step. The live view prints the names."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    SYNC = "sync"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    OTHER = "other"
    """Time outside of events: Python code between the phases, logging, metrics."""


_PHASES: Mapping[str, LivePhase] = {
    EventKind.DATA: LivePhase.DATA,
    EventKind.ITERATION: LivePhase.DATA,
    EventKind.FORWARD: LivePhase.FORWARD,
    EventKind.BROADCAST: LivePhase.SYNC,
    EventKind.EVALUATION: LivePhase.EVALUATION,
    EventKind.BACKWARD: LivePhase.BACKWARD,
    EventKind.OPTIMIZER: LivePhase.OPTIMIZER,
    EventKind.COLLECTIVE: LivePhase.SYNC,
    EventKind.BARRIER: LivePhase.SYNC,
    EventKind.WAIT: LivePhase.SYNC,
    EventKind.SAVE: LivePhase.CHECKPOINT,
    EventKind.LOAD: LivePhase.CHECKPOINT,
}
"""Phase by kind of event. Other events, such as a garbage collection, belong to the phase around them."""


@dataclass(frozen=True, slots=True)
class LiveStep:
    """One step of one rank. Times in ns; missing values are None."""

    number: int
    start_ns: int
    end_ns: int
    full: bool = False
    """Whether its events were recorded (the step is recorded in full)."""
    data_wait_ns: int | None = None
    samples: int | None = None
    arrival_ns: int | None = None
    """Epoch ns at which this rank's last gradient was ready; on a GPU, at which the host had issued it."""
    phases_ns: tuple[tuple[LivePhase, int], ...] = ()
    """(Phase, time) of the training thread; the times add up to the step."""

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


class _Event(msgspec.Struct, rename=renamed(EventField)):
    """The fields of an event that are needed here. :mod:`ddpdoctor.measure.steplog` reads all fields."""

    kind: str
    start_ns: _Nanoseconds = 0
    duration_ns: _Nanoseconds = 0
    count: _Nanoseconds | None = None
    exhausted: bool = False
    synced: bool | None = None
    ready_ns: list[_Nanoseconds] = []
    forward_end_ns: _Nanoseconds | None = None


class LiveLine(msgspec.Struct, rename=renamed(LineField)):
    """A line of the step log: a step, or the end of the recording."""

    step: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] | None = None
    time_ns: tuple[_Nanoseconds, _Nanoseconds] | int | None = None
    # The plain integer of this union has no bounds: with them, msgspec 0.22 crashes in a garbage collection after decoding.
    thin: bool = False
    events: list[_Event] = []
    end: bool = False

    def as_step(self) -> LiveStep | None:
        """The step in this line; None if the line contains none."""
        if self.step is None or not isinstance(self.time_ns, tuple) or self.time_ns[0] > self.time_ns[1]:
            return None
        if self.thin:
            return LiveStep(self.step, *self.time_ns)
        waits, samples, arrival = None, None, None
        for event in self.events:
            if event.kind == EventKind.DATA and not event.exhausted:
                waits = (waits or 0) + event.duration_ns
                samples = (samples or 0) + event.count if event.count is not None else samples
            elif (
                event.kind == EventKind.BACKWARD
                and event.synced
                and event.ready_ns
                and event.forward_end_ns is not None
            ):
                arrival = self.time_ns[0] + event.forward_end_ns + max(event.ready_ns)
        phases = _phases(self.events, self.time_ns[1] - self.time_ns[0])
        return LiveStep(self.step, *self.time_ns, True, waits, samples, arrival, phases)


decode_line = msgspec.json.Decoder(LiveLine).decode


def _phases(events: list[_Event], length_ns: int) -> tuple[tuple[LivePhase, int], ...]:
    """(Phase, time in ns). Each moment counts for the innermost event, so a collective within a forward pass is sync."""
    known = [(event.start_ns, event.duration_ns, _PHASES.get(event.kind)) for event in events]
    spent: dict[LivePhase, int] = {}
    open_events: list[tuple[int, LivePhase]] = []
    """(End, phase) of the events that contain ``at``, the outermost first."""
    at = 0

    def advance(until_ns: int) -> None:
        nonlocal at
        while at < until_ns:
            while open_events and open_events[-1][0] <= at:
                open_events.pop()
            end, phase = open_events[-1] if open_events else (until_ns, LivePhase.OTHER)
            moment = min(end, until_ns)
            spent[phase] = spent.get(phase, 0) + moment - at
            at = moment

    for start, duration, phase in sorted(known, key=lambda each: (each[0], -each[1])):
        if phase is not None and duration > 0:
            advance(min(start, length_ns))
            open_events.append((start + duration, phase))
    advance(length_ns)
    return tuple(spent.items())


@dataclass(frozen=True)
class Lateness:
    """Lateness of the ranks in the newest steps that all of them recorded in full."""

    by_rank_ms: dict[int, float] = field(default_factory=dict)
    """Median by rank, ms; empty if there are no common steps."""
    newest_ns: int = 0
    """End of the newest of those steps, epoch ns."""


class FileTail:
    """Reads the complete lines that were appended to a growing file since the last read."""

    def __init__(self, path: Path) -> None:
        self.path, self._position = path, 0
        self._shift = 0
        """Bytes that thinning removed from the file before ``_position``."""

    def read_new_lines(self) -> Iterator[bytes]:
        """The new lines; none if the file is missing or not a regular file."""
        try:
            with reading(str(self.path)) as source:
                shift = stream_shift(source.fileno())
                self._position = max(0, self._position + self._shift - shift)
                self._shift = shift
                size = source.seek(0, 2)
                skipped = size - self._position > LOOK_BYTES
                begin = source.seek(size - LOOK_BYTES if skipped else self._position)
                data = source.read(LOOK_BYTES)
        except OSError:
            return
        whole = data.rfind(b"\n") + 1
        self._position = begin + whole
        yield from data[:whole].split(b"\n")[1 if skipped else 0 : -1]


@dataclass
class LiveRank:
    """The recording of one rank so far."""

    rank: int
    host: str
    pid: int | None
    log: FileTail
    steps: deque[LiveStep] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    in_full: deque[LiveStep] = field(default_factory=lambda: deque(maxlen=KEPT_FULL))
    """Steps whose events were recorded; in jobs with short steps one block of steps in up to 64."""
    ended: bool = False
    """Whether its process group was destroyed, or its process ended without an error."""
    joined_ns: int | None = None
    """Epoch ns at which its process group was ready."""
    restarts: int = 0
    """Number of earlier starts, by an elastic launcher or by a command that starts several jobs."""
    first_ms: float | None = None
    """Duration of step 0, which includes the preparation; None if it was not read."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Number of steps by :func:`_length_class`."""

    @property
    def steps_total(self) -> int:
        """Steps completed since recording began."""
        return self.steps[-1].number + 1 if self.steps else 0

    def update(self) -> None:
        """Read the steps written since the last call; broken lines are skipped."""
        for text in self.log.read_new_lines():
            try:
                line = decode_line(text)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            step = line.as_step()
            if step is not None:
                self.steps.append(step)
                self.ended = False
                if step.number == 0:
                    self.first_ms = step.duration_ms
                elif step.duration_ms > 0:
                    self.lengths[_length_class(step.duration_ms)] += 1
                if step.full:
                    self.in_full.append(step)
            elif line.end:
                self.ended = True

    def median_step_ms(self) -> float | None:
        """Median time of all steps that were read, without step 0, with an error of 1 % at most; None without steps."""
        half, seen = sum(self.lengths.values()) / 2, 0
        for each in sorted(self.lengths):
            seen += self.lengths[each]
            if seen >= half:
                return float(2.0 ** (each / _CLASSES_PER_DOUBLING))
        return None

    def since_last_step_s(self) -> float | None:
        """Seconds since the end of the newest step, by this machine's clock; None before the first step and after the rank's end."""
        if self.ended or not self.steps:
            return None
        return age_s(self.steps[-1].end_ns)

    def recent(self, count: int) -> list[LiveStep]:
        """The newest ``count`` steps, without step 0, which includes the preparation."""
        return [step for step in list(self.steps)[-count:] if step.number > 0]

    def recent_in_full(self, count: int) -> list[LiveStep]:
        """The newest ``count`` steps recorded in full, however old, without step 0."""
        return [step for step in list(self.in_full)[-count:] if step.number > 0]

    def full_age_s(self) -> float | None:
        """Seconds since the end of the newest step recorded in full, by this machine's clock; None if there is none."""
        recent = self.recent_in_full(1)
        return age_s(recent[0].end_ns) if recent else None


def _length_class(length_ms: float) -> int:
    """Histogram class of a step time, about 1.4 % wide."""
    return round(_CLASSES_PER_DOUBLING * math.log2(length_ms))


def age_s(moment_ns: int) -> float:
    """Seconds since ``moment_ns`` (epoch ns), by this machine's clock; never negative."""
    return max(0.0, time.time() - moment_ns / 1e9)


class LiveRun:
    """A run directory that may still grow. ``update()`` reads what is new. Missing or broken files raise no error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: dict[str, Any] = {}
        self.ranks: dict[int, LiveRank] = {}
        self.gone = False
        """Whether the launcher was killed, so that no end will be recorded, and no rank of this host is left."""
        self.samples: dict[str, dict[str, Any]] = {}
        """Newest telemetry sample by host."""
        self.lateness = Lateness()
        """Lateness in the newest common steps recorded in full; kept until there are newer ones."""
        self._telemetry: dict[str, FileTail] = {}
        self._folders: set[str] = set()

    def update(self) -> None:
        """Read what was recorded since the last call."""
        self.manifest = read_manifest(str(self.path), []) or self.manifest
        killed = not self.ended and launcher_runs(str(self.path), self.manifest) is False
        self.gone = killed and not living_ranks(str(self.path))
        ranks = _folders(self.path / "ranks")
        for folder in sorted(ranks, key=lambda each: (parse_rank_directory(each.name) or ())[::-1]):
            if folder.name not in self._folders:
                self._add(folder)
        for rank in self.ranks.values():
            rank.update()
        found = self.lateness_of(RECENT_STEPS)
        self.lateness = found if found.by_rank_ms else self.lateness
        for folder in _folders(self.path / "hosts"):
            tail = self._telemetry.setdefault(folder.name, FileTail(folder / TELEMETRY_FILE))
            for line in tail.read_new_lines():
                sample = _sample(line)
                # The final sample is taken after the ranks have ended, so an earlier one is kept.
                if sample is not None and not (sample.get("final") and folder.name in self.samples):
                    self.samples[folder.name] = sample

    def _add(self, folder: Path) -> None:
        """Add a rank's recording. After an elastic restart it replaces the earlier one."""
        info = read_rank(str(folder), [])
        rank = None if info is None else info.get("rank")
        if info is None or rank is None:
            return
        self._folders.add(folder.name)
        self.lateness = Lateness()
        process, attempt = (str(info.get("host") or ""), info.get("pid")), info.get("attempt") or 0
        is_known = any(
            (live.host, live.pid) == process and attempt <= live.restarts for live in self.ranks.values()
        )
        before = self.ranks.get(rank)
        restarts = max(attempt, before.restarts + (not is_known) if before else 0)
        log, joined_ns = FileTail(folder / STEPS_FILE), info.get("started_ns")
        self.ranks[rank] = LiveRank(rank, *process, log, joined_ns=joined_ns, restarts=restarts)
        # A restarted job may have fewer ranks; the others are removed. A further process group of a known process removes none.
        world_size = math.inf if is_known else info.get("world_size") or math.inf
        self.ranks = {rank: live for rank, live in sorted(self.ranks.items()) if rank < world_size}

    @property
    def ended(self) -> bool:
        """Whether the launcher has recorded the end of its command."""
        return self.manifest.get("ended_ns") is not None

    @property
    def over(self) -> bool:
        """Whether nothing more will be recorded."""
        return self.ended or self.gone

    def silent_s(self) -> float | None:
        """Seconds since the newest step of all running ranks; None before the first step and after the job's end."""
        since = [] if self.over else [live.since_last_step_s() for live in self.ranks.values()]
        return min((seconds for seconds in since if seconds is not None), default=None)

    def long_silence_s(self) -> float | None:
        """``silent_s`` if that is long for this job, else None."""
        silent_s = self.silent_s()
        times = [ms for live in self.ranks.values() if (ms := step_ms(live, RECENT_STEPS)) is not None]
        usual_s = max(times, default=0.0) / 1e3
        return None if silent_s is None or silent_s < max(_SILENT_S, _SILENT_STEPS * usual_s) else silent_s

    def is_current_position(self, rank: int, position: Mapping[str, Any]) -> bool:
        """Whether the position that ``rank`` reported is from its present step. If a thread holds the GIL, the position is not updated."""
        live, step = self.ranks.get(rank), position.get("step")
        return live is None or step is None or step >= live.steps_total

    def lateness_of(self, count: int) -> Lateness:
        """Median lateness of each rank over the newest ``count`` steps that all ranks recorded in full: its arrival at the gradient
        reduction minus the median of the other ranks' arrivals (negative: earlier). Near zero if lateness rotates among ranks. Empty
        without such steps or with one rank.
        """
        arrivals = {
            rank: {
                step.number: step for step in live.recent_in_full(KEPT_FULL) if step.arrival_ns is not None
            }
            for rank, live in self.ranks.items()
        }
        if len(arrivals) < 2:
            return Lateness()
        common = sorted(set.intersection(*(set(steps) for steps in arrivals.values())))[-count:]
        late: dict[int, list[float]] = {rank: [] for rank in arrivals}
        newest_ns = 0
        for number in common:
            at = {rank: steps[number] for rank, steps in arrivals.items()}
            ends: dict[str, list[int]] = {}
            for rank, step in at.items():
                ends.setdefault(self.ranks[rank].host, []).append(step.end_ns)
            if _clock_was_set(ends, at):
                continue
            newest_ns = max(newest_ns, *(step.end_ns for step in at.values()))
            # Clock offset of each host in ns. All ranks end a step together, because of the gradient reduction before its end.
            medians = {host: statistics.median(values) for host, values in ends.items()}
            middle = statistics.median(medians.values())
            shift = {host: moment - middle for host, moment in medians.items()}
            arrived = {r: (s.arrival_ns or 0) - shift[self.ranks[r].host] for r, s in at.items()}
            order = sorted(arrived.values())
            for rank, moment in arrived.items():
                late[rank].append((moment - _median_of_others(order, moment)) / 1e6)
        return Lateness(
            {rank: statistics.median(values) for rank, values in late.items() if values}, newest_ns
        )

    def samples_per_s(self, count: int, host: str | None = None) -> float | None:
        """Samples per second of all ranks, or of the ranks of ``host``, from the batch sizes of the newest ``count`` steps recorded in full
        and the newest step times; None if batch sizes are unknown."""
        rates = []
        for live in self.ranks.values():
            if host not in (None, live.host):
                continue
            steps = [step for step in live.recent_in_full(count) if step.samples]
            if not steps:
                return None
            whole_ms = step_ms(live, count)
            rates.append(
                statistics.fmean(step.samples or 0 for step in steps) / whole_ms * 1e3 if whole_ms else 0
            )
        return sum(rates) if rates else None


def _clock_was_set(ends: Mapping[str, list[int]], at: Mapping[int, LiveStep]) -> bool:
    """Whether a host's clock was set during this step, so that its ranks' steps end further apart than the longest step lasts. ``ends``:
    epoch ns by host."""
    longest = max(step.end_ns - step.start_ns for step in at.values())
    return any(max(values) - min(values) > longest for values in ends.values())


def step_ms(live: LiveRank, count: int) -> float | None:
    """Median step time of a rank over its newest ``count`` steps, in ms."""
    return _median([step.duration_ms for step in live.recent(count)])


def data_wait_ms(live: LiveRank, count: int) -> float | None:
    """Median time per step that the rank's training thread waited for data, in ms."""
    return _median([s.data_wait_ns / 1e6 for s in live.recent_in_full(count) if s.data_wait_ns is not None])


def phase_shares(live: LiveRank, count: int) -> dict[LivePhase, float]:
    """Share of time by phase of the training thread, over the newest ``count`` steps recorded in full; empty if there are none."""
    spent: dict[LivePhase, int] = {}
    for step in live.recent_in_full(count):
        for phase, ns in step.phases_ns:
            spent[phase] = spent.get(phase, 0) + ns
    whole = sum(spent.values())
    return {phase: ns / whole for phase, ns in spent.items()} if whole else {}


def _median_of_others(order: list[float], own: float) -> float:
    """Median of the sorted list ``order`` without one entry, which equals ``own``."""
    place, count = bisect.bisect_left(order, own), len(order) - 1
    low, high = ((count - 1) // 2, count // 2)
    return (order[low + (low >= place)] + order[high + (high >= place)]) / 2


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _sample(line: bytes) -> dict[str, Any] | None:
    """The telemetry sample in a line, without unknown fields; None if the line contains none."""
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
