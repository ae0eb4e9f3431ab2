"""What GPUs, host and the ranks' processes did during a run: sampled in the launcher, once per host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.deferred import deferred

if TYPE_CHECKING:
    from .host import HOST_FIELDS, HostSampler
    from .live import RECENT_STEPS, LiveRank, LiveRun, data_wait_ms, phase_shares, step_ms
    from .livestep import LivePhase
    from .nvml import NvmlSampler
    from .processes import RANK_FIELDS, ProcessTreeSampler
    from .prometheus import METRICS, Exporter, serve_metrics
    from .reader import Telemetry, read_telemetry
    from .sampler import TelemetrySampler


_PLACES = {
    "Exporter": "prometheus",
    "HOST_FIELDS": "host",
    "HostSampler": "host",
    "LivePhase": "livestep",
    "LiveRank": "live",
    "LiveRun": "live",
    "METRICS": "prometheus",
    "NvmlSampler": "nvml",
    "ProcessTreeSampler": "processes",
    "RANK_FIELDS": "processes",
    "RECENT_STEPS": "live",
    "Telemetry": "reader",
    "TelemetrySampler": "sampler",
    "data_wait_ms": "live",
    "phase_shares": "live",
    "read_telemetry": "reader",
    "serve_metrics": "prometheus",
    "step_ms": "live",
}
__getattr__ = deferred(__name__, _PLACES)
