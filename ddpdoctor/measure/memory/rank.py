"""The memory of one rank: of its process and children from the host's telemetry, and of its device from torch's counters
(``memory.jsonl``). Invalid lines are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from ddpdoctor.measure.metrics import memory_of_gpu, rank_gpus
from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.summary import RankMemory
from ddpdoctor.measure.telemetry import HostTelemetry
from ddpdoctor.rundir import MEMORY_FILE, MEMORY_SCHEMA
from ddpdoctor.rundir.files import broken_lines
from ddpdoctor.rundir.stepevents import Phase

from .growing import MemoryKind, Observation, Rise, has_enough_readings, is_aliased, observation_of, rise_of

_PROCESS_FIELDS = ("process_memory_bytes", "process_rss_bytes")
"""The first available one is used: not every system reports memory without pages of files."""


class Series(msgspec.Struct, frozen=True):
    """Bytes over time."""

    times_ns: Array
    bytes_: Array

    def within(self, begin_ns: float, end_ns: float) -> Series:
        """The readings between two times, epoch ns, both included."""
        inside = (self.times_ns >= begin_ns) & (self.times_ns <= end_ns)
        return Series(self.times_ns[inside], self.bytes_[inside])

    @property
    def most(self) -> float | None:
        """Largest reading, bytes; None without readings."""
        return float(self.bytes_.max()) if len(self.bytes_) else None


NO_READINGS = Series(np.empty(0), np.empty(0))
_SET_BACK_NS = 1_000_000_000
"""A clock that was set back by less is not noticed: memory is read about once a second."""


def reading_times(log: RankLog) -> tuple[Array, Array]:
    """[N] (starts, ends) of the steps by the clock of memory readings: the host's wall clock, as if it had not been set back, because times
    in telemetry increase."""
    starts, ends = np.array([step.recorded_ns for step in log.steps], float).reshape(-1, 2).T
    back = ends[:-1] - starts[1:]
    behind = np.concatenate(([0.0], np.cumsum(np.where(back >= _SET_BACK_NS, back, 0.0))))[: len(starts)]
    return np.maximum.accumulate(starts + behind), ends + behind


def _on_time_of_steps(log: RankLog, held: Series) -> Series:
    """Readings on the time of the rank's steps, which does not contain the time for which a clock was set forward or the machine slept."""
    if not log.steps or held is NO_READINGS:
        return held
    starts, _ = reading_times(log)
    begins = np.array([step.start_ns for step in log.steps], float)
    place = np.clip(np.searchsorted(starts, held.times_ns, side="right") - 1, 0, None)
    next_begin = np.append(begins[1:], np.inf)[place]
    return Series(np.minimum(begins[place] + held.times_ns - starts[place], next_begin), held.bytes_)


def process_memory(log: RankLog, host: HostTelemetry) -> Series:
    """Memory of the rank's own process."""
    for field in _PROCESS_FIELDS:
        times, held = _column(log, host, field)
        known = ~np.isnan(held)
        if known.any():
            return Series(times[known], held[known])
    return NO_READINGS


def workers_memory(log: RankLog, host: HostTelemetry) -> Series:
    """Memory of all children together, at readings with the most frequent number of children, because workers start and end between
    epochs."""
    times, held = _column(log, host, "children_memory_bytes")
    _, children = _column(log, host, "num_children")
    numbers, often = np.unique(children[(children > 0) & ~np.isnan(held)], return_counts=True)
    if not len(numbers):
        return NO_READINGS
    usual = (children == numbers[often.argmax()]) & ~np.isnan(held)
    return Series(times[usual], held[usual])


def _column(log: RankLog, host: HostTelemetry, field: str) -> tuple[Array, Array]:
    """(times, values) of the recorded process; NaN for other process ids, such as those of an earlier attempt."""
    times, values = host.rank_column(log.rank, field)
    pid = log.record.info.get("pid")
    if pid is not None:
        values = np.where(host.rank_column(log.rank, "pid")[1] == float(pid), values, np.nan)
    return times.astype(float), values


def host_free(host: HostTelemetry, begin_ns: float, end_ns: float) -> tuple[float | None, float | None]:
    """(limit, least free memory between the two times by the clock of the readings), bytes; of the control group if it has less free
    memory."""
    stated = host.header.get("host_facts") or {}
    found = [
        (stated.get("memory_total_bytes"), host.host_column("memory_available_bytes")),
        (stated.get("cgroup_memory_limit_bytes"), host.host_column("cgroup_memory_free_bytes")),
    ]
    known = []
    for limit, (times, values) in found:
        inside = (times >= begin_ns) & (times <= end_ns) & ~np.isnan(values)
        if limit and inside.any():
            known.append((float(limit), float(values[inside].min())))
    return min(known, key=lambda pair: pair[1], default=(None, None))


_MOST_LINES = 100_000
"""More than a hundred years: the hook writes 600 lines for each doubling of its interval."""
_MOST_BYTES = 2**50
"""More than any device has."""
_LEAST_DEVICE_BYTES = 256 << 20
"""Less than a CUDA context alone takes."""

_PHASES = frozenset(phase.value for phase in Phase)

_Bytes = Annotated[int, Meta(ge=0, le=_MOST_BYTES)]
_Text = Annotated[str, Meta(max_length=64)]


class _Line(msgspec.Struct, frozen=True):
    schema: _Text | None = None
    total_bytes: _Bytes | None = None
    t_ns: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    step: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    phase: _Text | None = None
    allocated_bytes: _Bytes | None = None
    reserved_bytes: _Bytes | None = None
    allocated_peak_bytes: _Bytes | None = None
    reserved_peak_bytes: _Bytes | None = None
    retries: Annotated[int, Meta(ge=0, le=2**53)] | None = None

    @property
    def is_reading(self) -> bool:
        """Whether the line is a reading of the allocated bytes at a time."""
        return self.t_ns is not None and self.allocated_bytes is not None

    @property
    def most_bytes(self) -> int:
        """Largest number of bytes in the line."""
        tensors = self.allocated_bytes or 0, self.allocated_peak_bytes or 0
        return max(*tensors, self.reserved_bytes or 0, self.reserved_peak_bytes or 0)


class DeviceMemory(msgspec.Struct, frozen=True):
    """Device memory of one rank, by torch's counters; bytes."""

    total_bytes: int | None
    times_ns: Array
    """[N] epoch ns."""
    allocated: Array
    """[N] bytes."""
    allocated_peak: int
    reserved_peak: int
    reserved: int
    """At the last reading."""
    retries: int | None
    lasting_retries: int | None
    """Retries in the second half of the readings."""
    lasting_steps: int
    """Steps in that half."""
    phases: dict[str, int] = msgspec.field(default_factory=dict)
    """Phase of a step → largest allocation of tensors, bytes."""

    @property
    def step_swing(self) -> int:
        """Largest minus least allocation of tensors after the first half of the readings: mostly activations."""
        return self.allocated_peak - int(self.allocated[len(self.allocated) // 2 :].min())


def device_memory(log: RankLog, notes: list[str]) -> DeviceMemory | None:
    """The device memory of a rank; None if it recorded none, or if its file is invalid. Problems of the file are added to ``notes``."""
    readings, total = _readings(log, notes)
    if not readings:
        return None
    phases: dict[str, int] = {}
    for line in readings:
        if line.phase in _PHASES:
            phases[line.phase] = max(phases.get(line.phase, 0), line.allocated_bytes or 0)
    allocated = np.array([line.allocated_bytes for line in readings], float)
    lasting = readings[len(readings) // 2 :]
    counted = [line.retries for line in lasting if line.retries is not None]
    steps = [line.step for line in lasting if line.step is not None]
    return DeviceMemory(
        total_bytes=total,
        times_ns=np.array([line.t_ns for line in readings], float),
        allocated=allocated,
        # The job may reset torch's peak counters.
        allocated_peak=max(int(allocated.max()), *(line.allocated_peak_bytes or 0 for line in readings)),
        reserved_peak=max(max(line.reserved_peak_bytes or 0, line.reserved_bytes or 0) for line in readings),
        reserved=readings[-1].reserved_bytes or 0,
        retries=max((line.retries for line in readings if line.retries is not None), default=None),
        # The job may reset torch's counters.
        lasting_retries=max(0, counted[-1] - counted[0]) if counted else None,
        lasting_steps=max(0, steps[-1] - steps[0]) if steps else 0,
        phases=phases,
    )


def _readings(log: RankLog, notes: list[str]) -> tuple[list[_Line], int | None]:
    """(valid readings by time, size of the device in bytes or None)."""
    path = f"{log.record.path}/{MEMORY_FILE}"
    try:
        lines, broken = _lines(log)
    except FileNotFoundError:
        return [], None  # a rank on a CPU has none
    except OSError as error:
        notes.append(f"{path} cannot be read: {error.strerror or error}.")
        return [], None
    info = log.record.info
    is_lost = info.get("ended_ns") is not None and str(info.get("device") or "").startswith("cuda")
    if not lines and not broken and not is_lost:
        return [], None  # an empty file is an error only if the rank trained on a GPU and ended normally
    if not lines or lines[0].schema != MEMORY_SCHEMA:
        notes.append(f"{path} does not begin with a line of {MEMORY_SCHEMA} and is ignored.")
        return [], None
    readings = [line for line in lines if line.is_reading]
    broken += sum(not line.is_reading and line.schema is None for line in lines)
    total = next((line.total_bytes for line in lines if line.total_bytes is not None), None)
    if total is not None:
        possible = [line for line in readings if line.most_bytes <= total]
        if total < _LEAST_DEVICE_BYTES or 2 * len(possible) < len(readings):
            notes.append(
                f"{path}: the device's size, {total:,} bytes, is too small for what it holds, and is ignored."
            )
            total = None
        else:
            broken += len(readings) - len(possible)
            readings = possible
    if broken:
        notes.append(broken_lines(path, broken).text)
    return sorted(readings, key=lambda line: line.t_ns or 0), total


def _lines(log: RankLog) -> tuple[list[_Line], int]:
    """(decoded lines, number of broken lines). Raises OSError."""
    decode = msgspec.json.Decoder(_Line).decode
    lines, broken = [], 0
    for line in islice(log.record.lines(MEMORY_FILE), _MOST_LINES):
        try:
            lines.append(decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            broken += 1
    return lines, broken


class Rank(msgspec.Struct, frozen=True):
    """Memory of one rank: of its process, its children and, by tensors, on its device."""

    log: RankLog
    observation: Observation | None
    held: Mapping[MemoryKind, Series]
    """On the time of the log's steps."""
    rises: Mapping[MemoryKind, Rise]
    """Growth in the observation period; only kinds that grow."""
    observed: frozenset[MemoryKind]
    """Kinds with enough readings in the observation period."""
    device: DeviceMemory | None
    device_total: float | None
    device_used: float | None
    """Largest use by NVML, bytes."""

    def per_hour(self, bytes_per_step: float) -> float:
        """Bytes per hour, at the rank's mean step length in the observation period."""
        assert self.observation is not None
        return bytes_per_step * 3600e9 / self.observation.step_ns

    def hourly(self, place: MemoryKind) -> float:
        """Growth of ``place``, bytes per hour."""
        return self.per_hour(self.rises[place].slope)

    def may_be_cache(self, place: MemoryKind) -> bool:
        """Whether the growth may be a dataset cache that still fills."""
        seen = self.observation
        return seen is not None and seen.data_in == place and seen.cache_may_fill

    def ends_with_pass(self, place: MemoryKind) -> bool:
        """Whether the memory is that of workers that end with the epoch."""
        return place == MemoryKind.WORKERS and self.observation is not None and self.observation.workers_end

    def still_grows(self, place: MemoryKind) -> float | None:
        """Upper bound of the further growth, bytes, for a cache or workers that end with the epoch; None if there is no bound."""
        if self.observation is None or not (self.may_be_cache(place) or self.ends_with_pass(place)):
            return None
        left = self.observation.steps_left
        return None if left is None else left * self.rises[place].slope

    @property
    def device_most(self) -> float | None:
        """Largest use of the device, bytes: the larger of NVML's and torch's values. Torch's lack CUDA context and communicators."""
        values = [self.device.reserved_peak if self.device else None, self.device_used]
        return max((float(each) for each in values if each is not None), default=None)

    @property
    def device_free(self) -> float | None:
        """Bytes of the device that tensors can still use at the end: without tensors, and without other use by NVML."""
        if self.device is None or self.device_total is None:
            return None
        others = max(0.0, (self.device_used or 0.0) - self.device.reserved)
        return max(0.0, self.device_total - others - float(self.device.allocated[-1]))

    @property
    def settled_on_host(self) -> float | None:
        """Largest use of the process plus that of its children in the observation period, bytes; the two may be at different times."""
        if self.observation is None:
            return None
        span = self.observation.begin_ns, self.observation.end_ns
        process, workers = (
            self.held[each].within(*span).most for each in (MemoryKind.PROCESS, MemoryKind.WORKERS)
        )
        return None if process is None else process + (workers or 0.0)

    @property
    def summary(self) -> RankMemory | None:
        """The rank's memory in the table of ranks; None if nothing is known."""
        if self.held[MemoryKind.PROCESS].most is None and self.device_most is None:
            return None
        rise = self.rises.get(MemoryKind.PROCESS)
        return RankMemory(
            process_bytes=self.held[MemoryKind.PROCESS].most,
            workers_bytes=self.held[MemoryKind.WORKERS].most,
            grows_bytes_per_hour=self.per_hour(rise.slope) if rise else None,
            allocated_peak_bytes=float(self.device.allocated_peak) if self.device else None,
            reserved_peak_bytes=float(self.device.reserved_peak) if self.device else None,
            device_total_bytes=self.device_total,
            phase_peak_bytes={
                name: float(most) for name, most in (self.device.phases if self.device else {}).items()
            },
        )


def ranks_of(logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry], notes: list[str]) -> list[Rank]:
    """Memory of all ranks; faults of their files are added to ``notes``."""
    gpus = rank_gpus(logs, hosts)
    return [_rank(log, hosts, gpus.get(log.rank), notes) for log in logs]


def _rank(
    log: RankLog, hosts: Mapping[str, HostTelemetry], gpu: tuple[str, int] | None, notes: list[str]
) -> Rank:
    host, device, span = hosts.get(log.host), device_memory(log, notes), observation_of(log)
    used, total = (None, None) if gpu is None else memory_of_gpu(hosts[gpu[0]], gpu[1])
    read = {
        MemoryKind.PROCESS: NO_READINGS if host is None else process_memory(log, host),
        MemoryKind.WORKERS: NO_READINGS if host is None else workers_memory(log, host),
        MemoryKind.DEVICE: NO_READINGS if device is None else Series(device.times_ns, device.allocated),
    }
    held = {place: _on_time_of_steps(log, series) for place, series in read.items()}
    rises, observed = {}, set()
    for place, whole in held.items() if span is not None else ():
        assert span is not None
        part = whole.within(span.begin_ns, span.end_ns)
        progress = _progress(log, part)
        if not has_enough_readings(len(progress)) or is_aliased(progress % 1.0):
            continue
        observed.add(place)
        rise = rise_of(progress, part.bytes_, cache=span.data_in == place)
        if rise is not None and not (place == MemoryKind.WORKERS and span.workers_ended):
            rises[place] = rise
    stated = device.total_bytes if device is not None else None
    return Rank(log, span, held, rises, frozenset(observed), device, float(stated) if stated else total, used)


def _progress(log: RankLog, held: Series) -> Array:
    """[N] steps done at each reading, including the fraction of the running step."""
    starts = np.array([step.start_ns for step in log.steps], float)
    ends = np.array([step.end_ns for step in log.steps], float)
    numbers = np.array([step.number for step in log.steps], float)
    place = np.clip(np.searchsorted(starts, held.times_ns, side="right") - 1, 0, None)
    # If the following steps were not read, the count is interpolated up to the next step that was.
    following = np.minimum(place + 1, len(starts) - 1)
    last = following == place
    until = np.where(last, ends[place], starts[following])
    count = np.where(last, 1.0, numbers[following] - numbers[place])
    share = np.clip((held.times_ns - starts[place]) / np.maximum(until - starts[place], 1.0), 0.0, 1.0)
    return np.maximum.accumulate(numbers[place] + share * count)
