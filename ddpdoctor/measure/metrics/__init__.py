"""What is measured without asking for causes: times, breakdown, communication, devices, machines, settings.

In: the graph, the logs and windows behind it, telemetry. Out: groups of facts, and what reports draw. The idea: one function
for each group of facts; nothing here is priced and nobody is accused.
"""

from .bandwidth import (
    bandwidth_points,
    bus_factor,
    canonical,
    large_bus_gb_per_s,
    latency_and_rate,
    transfers,
)
from .breakdown import critical_breakdown, cycle_breakdown, rank_breakdown
from .links import slow_link_ranks
from .machines import gpu_telemetry, host_facts, telemetry_series
from .of_windows import (
    bucket_facts,
    communication_facts,
    gpu_facts,
    message_cost,
    wait_and_transfer_ms,
)
from .profilercost import window_cost
from .reducer import reducer_work, search_ms, searches_unused
from .settings import ddp_facts, job_facts, loader_facts
from .steps import SLOW_STEP, outstanding, step_facts
from .summaries import rank_summaries, series
from .timeline import timeline

__all__ = [
    "SLOW_STEP",
    "bandwidth_points",
    "bucket_facts",
    "bus_factor",
    "canonical",
    "communication_facts",
    "critical_breakdown",
    "cycle_breakdown",
    "ddp_facts",
    "gpu_facts",
    "gpu_telemetry",
    "host_facts",
    "job_facts",
    "large_bus_gb_per_s",
    "latency_and_rate",
    "loader_facts",
    "message_cost",
    "outstanding",
    "rank_breakdown",
    "rank_summaries",
    "reducer_work",
    "search_ms",
    "searches_unused",
    "series",
    "slow_link_ranks",
    "step_facts",
    "telemetry_series",
    "timeline",
    "transfers",
    "wait_and_transfer_ms",
    "window_cost",
]
