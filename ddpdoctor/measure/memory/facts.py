"""The facts of the family ``memory``, and each rank's memory for the table of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.measure.runfacts import Growth, MemoryFacts
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.summary import RankMemory
from ddpdoctor.measure.telemetry import HostTelemetry

from .growing import MemoryKind
from .rank import DeviceMemory, Rank, host_free, ranks_of, reading_times

_KEPT_FREE = 0.1
"""Part of the headroom that is not usable: allocators round up, and fragments are lost."""
_LEAST_ACTIVATIONS = 0.05
"""Minimum part of the peak that activations take for an estimate: with less, no reading was taken while they were freed."""
_INHERITED = 2.0
"""Minimum growth of each worker as a multiple of the rank's growth. Less is inherited from the rank, by newly forked workers."""


class Memory(msgspec.Struct, frozen=True):
    """Memory of a job."""

    facts: MemoryFacts
    ranks: Mapping[int, RankMemory]
    """Rank number → memory in the table of ranks; without ranks for which nothing is known."""
    notes: Sequence[str] = ()


_Free = Callable[[Rank], tuple[float | None, float]]
"""Rank → (free bytes of its host or device, growth of everything there in bytes per hour)."""


def memory_of(logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry]) -> Memory:
    """Facts and notes on the memory of a recorded job."""
    notes: list[str] = []
    ranks = ranks_of(logs, hosts, notes)
    here: dict[str, list[Rank]] = {}
    for rank in ranks:
        here.setdefault(rank.log.host, []).append(rank)
    free: dict[str, tuple[float | None, float | None]] = {}
    for name, own in here.items():
        times = [reading_times(rank.log) for rank in own if rank.log.steps]
        if name in hosts and times:
            begin_ns, end_ns = min(starts[0] for starts, _ in times), max(ends.max() for _, ends in times)
            free[name] = host_free(hosts[name], begin_ns, end_ns)
    grows = {place: [rank for rank in ranks if place in rank.rises] for place in MemoryKind}
    grows[MemoryKind.WORKERS] = [rank for rank in grows[MemoryKind.WORKERS] if not _workers_inherit(rank)]

    def on_host(rank: Rank) -> tuple[float | None, float]:
        name = rank.log.host
        hourly = sum(
            each.hourly(place)
            for place in (MemoryKind.PROCESS, MemoryKind.WORKERS)
            for each in grows[place]
            if each.log.host == name
        )
        return free[name][1] if name in free else None, hourly

    retries, steps_per_retry = _lasting_retries([rank.device for rank in ranks if rank.device])
    facts = MemoryFacts(
        watched_hours=_observed_hours(ranks, MemoryKind.PROCESS),
        process=_growth(grows[MemoryKind.PROCESS], MemoryKind.PROCESS, on_host),
        workers=_growth(grows[MemoryKind.WORKERS], MemoryKind.WORKERS, on_host),
        device_watched_hours=_observed_hours(ranks, MemoryKind.DEVICE),
        device=_growth(
            grows[MemoryKind.DEVICE],
            MemoryKind.DEVICE,
            lambda rank: (rank.device_free, rank.hourly(MemoryKind.DEVICE)),
        ),
        **_usage(ranks),
        **_headroom(ranks, here, free, hosts),
        allocated_peak_bytes=_max_or_none(rank.device.allocated_peak for rank in ranks if rank.device),
        reserved_peak_bytes=_max_or_none(rank.device.reserved_peak for rank in ranks if rank.device),
        allocation_retries=_max_or_none(rank.device.retries for rank in ranks if rank.device),
        lasting_retries=retries,
        steps_per_retry=steps_per_retry,
    )
    return Memory(
        facts, {rank.log.rank: summary for rank in ranks if (summary := rank.summary) is not None}, notes
    )


def _lasting_retries(devices: Sequence[DeviceMemory]) -> tuple[float | None, float | None]:
    """(the allocator's retries in the second half of the readings, steps per retry) of the rank with most retries."""
    counts = [
        (float(each.lasting_retries), each.lasting_steps)
        for each in devices
        if each.lasting_retries is not None
    ]
    count, steps = max(counts, default=(None, 0))
    return count, steps / count if count and steps else None


def _workers_inherit(rank: Rank) -> bool:
    """Whether forking from the growing rank explains the growth of its workers."""
    own = rank.rises.get(MemoryKind.PROCESS)
    workers = int((rank.log.main_loader_settings or {}).get("num_workers") or 1)
    return own is not None and rank.rises[MemoryKind.WORKERS].slope / workers < _INHERITED * own.slope


def _observed_hours(ranks: Sequence[Rank], place: MemoryKind) -> float | None:
    return _max_or_none(
        rank.observation.hours for rank in ranks if rank.observation is not None and place in rank.observed
    )


def _growth(growing: Sequence[Rank], place: MemoryKind, left: _Free) -> Growth | None:
    if not growing:
        return None
    fastest = max(growing, key=lambda rank: rank.hourly(place))
    rise = fastest.rises[place]
    known = [
        (free / hourly, free, rank.log.host)
        for rank in growing
        for free, hourly in [left(rank)]
        if free is not None
    ]
    hours, free, host = min(known, default=(None, None, fastest.log.host))
    still = [rank.still_grows(place) for rank in growing if rank.log.host == host]
    bounds = [each for each in still if each is not None]
    bounded = sum(bounds) if len(bounds) == len(still) else None
    return Growth(
        ranks=sorted(rank.log.rank for rank in growing),
        fastest_rank=fastest.log.rank,
        bytes_per_step=rise.slope,
        bytes_per_hour=fastest.per_hour(rise.slope),
        low_bytes_per_hour=fastest.per_hour(rise.low),
        high_bytes_per_hour=fastest.per_hour(rise.high),
        grown_bytes=rise.grown_bytes,
        held_bytes=rise.held_bytes,
        free_bytes=free,
        full_in_hours=hours,
        may_be_cache=fastest.may_be_cache(place),
        ends_with_pass=fastest.ends_with_pass(place),
        bounded_bytes=bounded,
        bound_fits=None if bounded is None or free is None else bounded <= free,
    )


def _usage(ranks: Sequence[Rank]) -> dict[str, Any]:
    """Facts on ranks that use more than the others: device memory if all ranks recorded it, host memory in jobs on CPUs."""
    on_device = all(rank.device_most is not None for rank in ranks)
    if not ranks or not (on_device or _on_cpus(ranks)):
        return {}
    found = [(rank.log.rank, rank.device_most if on_device else rank.settled_on_host) for rank in ranks]
    known = {number: held for number, held in found if held is not None}
    if len(known) < len(ranks):
        return {}
    worst = max(known, key=lambda number: known[number])
    amounts: dict[str, Any] = {"on_device": on_device, "most_bytes": known[worst], "heaviest_rank": worst}
    if len(known) > 1:
        typical = float(np.median([held for number, held in known.items() if number != worst]))
        excess = {number: held - typical for number, held in known.items()}
        amounts["typical_bytes"] = typical
        amounts["heavy_ranks"] = [
            number for number, more in excess.items() if more > 0 and more >= excess[worst] / 2
        ]
    return amounts


def _on_cpus(ranks: Sequence[Rank]) -> bool:
    return all(rank.log.record.info.get("device") == "cpu" for rank in ranks)


def _headroom(
    ranks: Sequence[Rank],
    here: Mapping[str, Sequence[Rank]],
    free: Mapping[str, tuple[float | None, float | None]],
    hosts: Mapping[str, HostTelemetry],
) -> dict[str, Any]:
    """Facts on memory that was never used. On CPUs it is divided among all ranks on the host, including those without a step log."""
    if ranks and _on_cpus(ranks):
        known = [
            (left / limit, left / _ranks_on(hosts[name], here[name]), limit)
            for name, (limit, left) in free.items()
            if limit and left is not None
        ]
        if not known:
            return {}
        share, each, limit = min(known)
        return {"limit_bytes": limit, "headroom_bytes": each, "headroom_share": share}
    devices = [
        (max(0.0, rank.device_total - rank.device_most), rank.device_total, rank)
        for rank in ranks
        if rank.device_total and rank.device_most is not None
    ]
    if not devices or len(devices) < len(ranks):
        return {}
    left, total, fullest = min(devices, key=lambda each: each[0] / each[1])
    room: dict[str, Any] = {"limit_bytes": total, "headroom_bytes": left, "headroom_share": left / total}
    device = fullest.device
    if device is not None and device.step_swing >= _LEAST_ACTIVATIONS * device.allocated_peak > 0:
        room["batch_times"] = 1.0 + (1 - _KEPT_FREE) * left / device.step_swing
    return room


def _ranks_on(host: HostTelemetry, recorded: Sequence[Rank]) -> int:
    """Number of the job's ranks on a host: those with a step log, and others in its telemetry. Rank numbers from the world size on are
    ignored, because an earlier attempt may have had more ranks."""
    world = int(recorded[0].log.record.info.get("world_size") or 0)
    known = {rank.log.rank for rank in recorded}
    return len(known.union(rank for rank in host.ranks if rank < world))


def _max_or_none(values: Iterable[float | None]) -> float | None:
    return max((float(value) for value in values if value is not None), default=None)
