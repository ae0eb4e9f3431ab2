"""Samples of GPUs, host and the ranks' processes during a run, once per host; a running job's records for ``watch`` and Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.deferred import deferred

if TYPE_CHECKING:
    from .goodput import RunSoFar, run_so_far
    from .host import HOST_FIELDS, HostSampler
    from .live import RECENT_STEPS, LivePhase, LiveRank, LiveRun, data_wait_ms, phase_shares, step_ms
    from .nvml import NvmlSampler
    from .processes import RANK_FIELDS, ProcessTreeSampler
    from .prometheus import METRICS, Exporter, Sample, page_of, serve_metrics, served
    from .reader import Telemetry, read_telemetry
    from .sampler import TelemetrySampler


__getattr__ = deferred(
    __name__,
    {
        "goodput": "RunSoFar run_so_far",
        "host": "HOST_FIELDS HostSampler",
        "live": "LivePhase LiveRank LiveRun RECENT_STEPS data_wait_ms phase_shares step_ms",
        "nvml": "NvmlSampler",
        "processes": "ProcessTreeSampler RANK_FIELDS",
        "prometheus": "Exporter METRICS Sample page_of serve_metrics served",
        "reader": "Telemetry read_telemetry",
        "sampler": "TelemetrySampler",
    },
)
