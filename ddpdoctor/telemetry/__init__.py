"""Samples GPUs, host and the ranks' processes during a run, once per host; reads a running job's records for ``watch`` and Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.deferred import deferred

if TYPE_CHECKING:
    from .host import HOST_FIELDS, HostSampler
    from .live import RECENT_STEPS, LivePhase, LiveRank, LiveRun, data_wait_ms, phase_shares, step_ms
    from .nvml import NvmlSampler
    from .prometheus import (
        METRICS,
        Exporter,
        RunSoFar,
        Sample,
        metrics_server,
        page_of,
        run_so_far,
        serve_metrics,
    )
    from .reader import Telemetry, read_telemetry
    from .sampler import RANK_FIELDS, ProcessTreeSampler, TelemetrySampler


__getattr__ = deferred(
    __name__,
    {
        "host": "HOST_FIELDS HostSampler",
        "live": "LivePhase LiveRank LiveRun RECENT_STEPS data_wait_ms phase_shares step_ms",
        "nvml": "NvmlSampler",
        "prometheus": "Exporter METRICS RunSoFar Sample metrics_server page_of run_so_far serve_metrics",
        "reader": "Telemetry read_telemetry",
        "sampler": "ProcessTreeSampler RANK_FIELDS TelemetrySampler",
    },
)
