"""What is measured without asking for causes: times, breakdown, communication, devices, machines, settings.

In: the graph, the logs and windows behind it, telemetry. Out: groups of facts, and what reports draw. The idea: one function
of one module builds a group of facts, whole; nothing here is priced and nobody is accused. What is known only from elsewhere,
such as a favoured bucket size, is an argument.
"""

from .bandwidth import (
    bandwidth_points,
    bus_factor,
    large_bus_gb_per_s,
    latency_and_rate,
    transfers,
)
from .breakdown import critical_breakdown, cycle_breakdown, rank_breakdown
from .buckets import Reductions, bucket_facts, reductions_of
from .communication import communication_facts, wait_and_transfer_ms
from .cores import Cores, host_cores
from .curves import readings, telemetry_series
from .ddp import ddp_facts
from .gpus import gpu_facts
from .hosts import host_facts
from .job import job_facts
from .links import slow_link_ranks
from .loader import asleep_shares, loader_facts
from .messages import message_cost
from .nvml import device_errors, rank_gpus
from .profilercost import window_cost
from .reducer import reducer_work
from .search import search_ms
from .steps import SLOW_STEP, outstanding, step_facts
from .summaries import behind, lateness, rank_summaries, series, typical_arrival
from .timeline import timeline
from .userlines import users_line
