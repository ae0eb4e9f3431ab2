"""What GPUs, host and the ranks' processes did during a run: sampled in the launcher, once per host."""

from .host import HOST_FIELDS, HostSampler
from .lock import HostLock, acquire_host_lock
from .nvml import NvmlSampler
from .processes import RANK_FIELDS, ProcessTreeSampler
from .reader import Telemetry, read_telemetry
from .sampler import TELEMETRY_SCHEMA, TelemetrySampler

__all__ = [
    "HOST_FIELDS",
    "RANK_FIELDS",
    "TELEMETRY_SCHEMA",
    "HostLock",
    "HostSampler",
    "NvmlSampler",
    "ProcessTreeSampler",
    "Telemetry",
    "TelemetrySampler",
    "acquire_host_lock",
    "read_telemetry",
]
