"""Telemetry over time, as the report draws it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.summary import TelemetrySeries
from ddpdoctor.measure.telemetry import HostTelemetry

_MOST_POINTS = 300
"""Of a curve: more than a chart of the report has room for."""
_HOST_FIELDS = (("cpu_percent", "%"), ("memory_used_bytes", "bytes"))
_GPU_FIELDS = (
    ("gpu_utilization_percent", "%"),
    ("memory_used_bytes", "bytes"),
    ("power_watts", "W"),
    ("sm_clock_mhz", "MHz"),
    ("temperature_celsius", "°C"),
)
_RANK_FIELDS = (("process_memory_bytes", "bytes"), ("children_memory_bytes", "bytes"))
"""Fields of the samples, each with its unit."""
_MOST_RANKS = 32
"""Of the job, of which each is drawn: of more, a chart shows nothing, and the report becomes long."""


Reading = tuple[str, str, str, NDArray[np.int64], NDArray[np.float64]]
"""Source, field and unit; times, epoch ns of the host's own clock, and values."""


def readings(hosts: Mapping[str, HostTelemetry]) -> Iterator[Reading]:
    """Everything that is drawn of the hosts, their GPUs and ranks, less what was never read."""
    with_ranks = _few_ranks(hosts)
    for name, host in hosts.items():
        yield from _of_host(name, host, with_ranks)


def _few_ranks(hosts: Mapping[str, HostTelemetry]) -> bool:
    return sum(len(host.ranks) for host in hosts.values()) <= _MOST_RANKS


def _of_host(name: str, host: HostTelemetry, with_ranks: bool) -> Iterator[Reading]:
    columns = [(name, field, unit, host.host_column(field)) for field, unit in _HOST_FIELDS]
    for index in (int(gpu["index"]) for gpu in host.gpus):
        source = f"{name} GPU {index}"
        columns += [(source, field, unit, host.gpu_column(index, field)) for field, unit in _GPU_FIELDS]
    for rank in host.ranks if with_ranks else ():
        source = f"{name} rank {rank}"
        columns += [(source, field, unit, host.rank_column(rank, field)) for field, unit in _RANK_FIELDS]
    for source, field, unit, (times, values) in columns:
        if len(values) and not np.isnan(values).all():
            yield source, field, unit, times, values


def telemetry_series(hosts: Mapping[str, HostTelemetry], started_ns: int | None) -> list[TelemetrySeries]:
    """Curves of all hosts and their GPUs, thinned; times count from ``started_ns``, else from each host's first sample."""
    with_ranks = _few_ranks(hosts)
    return [
        _curve(reading, started_ns or int(host.header.get("started_ns") or 0))
        for name, host in hosts.items()
        for reading in _of_host(name, host, with_ranks)
    ]


def _curve(reading: Reading, origin_ns: int) -> TelemetrySeries:
    """Every so manieth reading."""
    source, field, unit, times, values = reading
    stride = -(-len(values) // _MOST_POINTS)
    return TelemetrySeries(
        source=source,
        field=field,
        unit=unit,
        t_s=[round(float(time - origin_ns) / 1e9, 3) for time in times[::stride]],
        values=[None if np.isnan(value) else round(float(value), 3) for value in values[::stride]],
    )
