"""The memory of one rank, measured once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.metrics import rank_gpus
from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.summary import RankMemory
from ddpdoctor.measure.telemetry import HostTelemetry

from .devicelog import DeviceMemory, device_memory
from .growing import Rise, aliased, enough, rise_of
from .processes import NOTHING, Held, process_held, workers_held
from .watched import Place, Watched, watched

_HOUR_NS = 3600e9
"""Of an hour."""


class Rank(msgspec.Struct, frozen=True):
    """What is known of one rank; what is held in its process, its children and, by tensors, on its device."""

    log: RankLog
    watched: Watched | None
    held: Mapping[Place, Held]
    rises: Mapping[Place, Rise]
    """Of those that grow, while they were watched."""
    looked: frozenset[Place]
    """Which were watched for long enough."""
    device: DeviceMemory | None
    device_total: float | None
    device_used: float | None
    """Most that was in use by NVML."""

    @property
    def number(self) -> int:
        """The rank's."""
        return self.log.rank

    def per_hour(self, bytes_per_step: float) -> float:
        """At the pace at which the rank trained while it was watched."""
        assert self.watched is not None
        return bytes_per_step * _HOUR_NS / self.watched.step_ns

    def hourly(self, place: Place) -> float:
        """Bytes per hour by which it grows there."""
        return self.per_hour(self.rises[place].slope)

    def may_be_cache(self, place: Place) -> bool:
        """Whether a data set that still fills a cache lies there."""
        return self.watched is not None and self.watched.data_in == place and self.watched.cache_may_fill

    def ends_with_pass(self, place: Place) -> bool:
        """Whether workers hold it that end with the pass over the data."""
        return place == Place.WORKERS and self.watched is not None and self.watched.workers_end

    def still_grows(self, place: Place) -> float | None:
        """Bytes, at most, where a cache or workers that end bound it; None where nothing does, or that is unknown."""
        if self.watched is None or not (self.may_be_cache(place) or self.ends_with_pass(place)):
            return None
        left = self.watched.steps_left
        return None if left is None else left * self.rises[place].slope

    def most(self, place: Place) -> float | None:
        """Most that was held there, start-up included."""
        return self.held[place].most

    @property
    def device_most(self) -> float | None:
        """Most that was taken of the device, by whoever says more; torch's counters lack its context and communicators."""
        said = [self.device.reserved_peak if self.device else None, self.device_used]
        return max((float(each) for each in said if each is not None), default=None)

    @property
    def device_free(self) -> float | None:
        """What tensors can still take of the device at the end, by NVML what others hold left out."""
        if self.device is None or self.device_total is None:
            return None
        others = max(0.0, (self.device_used or 0.0) - self.device.reserved)
        return max(0.0, self.device_total - others - float(self.device.allocated[-1]))

    @property
    def settled_on_host(self) -> float | None:
        """Most that process and children held, each at its own time, once the job had settled."""
        if self.watched is None:
            return None
        span = self.watched.begin_ns, self.watched.end_ns
        process, workers = (self.held[each].within(*span).most for each in (Place.PROCESS, Place.WORKERS))
        return None if process is None else process + (workers or 0.0)

    @property
    def told(self) -> RankMemory | None:
        """What the table of ranks shows; None where nothing is known."""
        if self.most(Place.PROCESS) is None and self.device_most is None:
            return None
        rise = self.rises.get(Place.PROCESS)
        return RankMemory(
            process_bytes=self.most(Place.PROCESS),
            workers_bytes=self.most(Place.WORKERS),
            grows_bytes_per_hour=self.per_hour(rise.slope) if rise else None,
            allocated_peak_bytes=float(self.device.allocated_peak) if self.device else None,
            reserved_peak_bytes=float(self.device.reserved_peak) if self.device else None,
            device_total_bytes=self.device_total,
            phase_peak_bytes={
                name: float(most) for name, most in (self.device.phases if self.device else {}).items()
            },
        )


def ranks_of(logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry], notes: list[str]) -> list[Rank]:
    """All ranks; what is wrong with their files goes to ``notes``."""
    gpus = rank_gpus(logs, hosts)
    return [_rank(log, hosts, gpus.get(log.rank), notes) for log in logs]


def _rank(
    log: RankLog, hosts: Mapping[str, HostTelemetry], gpu: tuple[str, int] | None, notes: list[str]
) -> Rank:
    host, device, span = hosts.get(log.host), device_memory(log, notes), watched(log)
    used, total = _nvml(hosts[gpu[0]], gpu[1]) if gpu is not None else (None, None)
    held = {
        Place.PROCESS: NOTHING if host is None else process_held(log, host),
        Place.WORKERS: NOTHING if host is None else workers_held(log, host),
        Place.DEVICE: NOTHING if device is None else Held(device.times_ns, device.allocated),
    }
    rises, looked = {}, set()
    for place, whole in held.items() if span is not None else ():
        assert span is not None
        part = whole.within(span.begin_ns, span.end_ns)
        progress = _progress(log, part)
        if not enough(len(progress)) or aliased(progress % 1.0):
            continue
        looked.add(place)
        rise = rise_of(progress, part.bytes_, cache=span.data_in == place)
        if rise is not None and not (place == Place.WORKERS and span.workers_ended):
            rises[place] = rise
    stated = device.total_bytes if device is not None else None
    return Rank(log, span, held, rises, frozenset(looked), device, float(stated) if stated else total, used)


def _progress(log: RankLog, held: Held) -> Array:
    """Steps done at each reading, with the part of the one that was under way."""
    starts = np.array([step.start_ns for step in log.steps], float)
    ends = np.array([step.end_ns for step in log.steps], float)
    numbers = np.array([step.number for step in log.steps], float)
    place = np.clip(np.searchsorted(starts, held.times_ns, side="right") - 1, 0, None)
    # Of steps that were not read, the next one's start is known.
    following = np.minimum(place + 1, len(starts) - 1)
    last = following == place
    until = np.where(last, ends[place], starts[following])
    count = np.where(last, 1.0, numbers[following] - numbers[place])
    share = np.clip((held.times_ns - starts[place]) / np.maximum(until - starts[place], 1.0), 0.0, 1.0)
    return np.maximum.accumulate(numbers[place] + share * count)


def _nvml(host: HostTelemetry, index: int) -> tuple[float | None, float | None]:
    """(most in use, whole) of a GPU, bytes."""
    values = host.gpu_column(index, "memory_used_bytes")[1]
    known = values[values == values]
    whole = next((gpu.get("memory_total_bytes") for gpu in host.gpus if gpu.get("index") == index), None)
    return (float(known.max()) if len(known) else None), (float(whole) if whole else None)
