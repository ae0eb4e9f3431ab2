"""Telemetry over time, as the report draws it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ddpdoctor.measure.summary import TelemetrySeries
from ddpdoctor.measure.telemetry import Column, HostTelemetry

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
"""Fields of the samples, each with its unit."""


def telemetry_series(hosts: Mapping[str, HostTelemetry], started_ns: int | None) -> list[TelemetrySeries]:
    """Curves of all hosts and their GPUs, thinned; times count from ``started_ns``, else from each host's first sample."""
    curves = []
    for name, host in hosts.items():
        origin_ns = started_ns or int(host.header.get("started_ns") or 0)
        for field, unit in _HOST_FIELDS:
            curves.append(_curve(name, field, unit, host.host_column(field), origin_ns))
        for gpu in host.gpus:
            index = int(gpu["index"])
            for field, unit in _GPU_FIELDS:
                column = host.gpu_column(index, field)
                curves.append(_curve(f"{name} GPU {index}", field, unit, column, origin_ns))
    return [curve for curve in curves if curve is not None]


def _curve(source: str, field: str, unit: str, column: Column, origin_ns: int) -> TelemetrySeries | None:
    """Every so manieth reading; None where nothing was read."""
    times, values = column
    if not len(values) or np.isnan(values).all():
        return None
    stride = -(-len(values) // _MOST_POINTS)
    return TelemetrySeries(
        source=source,
        field=field,
        unit=unit,
        t_s=[round(float(time - origin_ns) / 1e9, 3) for time in times[::stride]],
        values=[None if np.isnan(value) else round(float(value), 3) for value in values[::stride]],
    )
