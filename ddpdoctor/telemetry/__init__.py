"""What GPUs, host and the ranks' processes did during a run: sampled in the launcher, once per host."""

from .host import HOST_FIELDS, HostSampler
from .live import LiveRank, LiveRun, data_wait_ms, step_ms
from .lock import HostLock, acquire_host_lock
from .nvml import NvmlSampler
from .processes import RANK_FIELDS, ProcessTreeSampler
from .prometheus import METRICS, Exporter, start_exporter
from .reader import Telemetry, read_telemetry
from .sampler import TELEMETRY_SCHEMA, TelemetrySampler

__all__ = [
    "HOST_FIELDS",
    "METRICS",
    "RANK_FIELDS",
    "TELEMETRY_SCHEMA",
    "Exporter",
    "HostLock",
    "HostSampler",
    "LiveRank",
    "LiveRun",
    "NvmlSampler",
    "ProcessTreeSampler",
    "Telemetry",
    "TelemetrySampler",
    "acquire_host_lock",
    "data_wait_ms",
    "read_telemetry",
    "start_exporter",
    "step_ms",
]
