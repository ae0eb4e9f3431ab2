"""What is measured without asking for causes: times, breakdown, communication, devices, machines, settings.

In: the graph, the logs and windows behind it, telemetry. Out: groups of facts, and what reports draw. The idea: one function
of one module builds a group of facts, whole; nothing here is priced and nobody is accused. What is known only from elsewhere,
such as a favoured bucket size, is an argument.
"""

from .breakdown import critical_breakdown, cycle_breakdown, rank_breakdown
from .buckets import reducer_work, reductions_of
from .charts import (
    behind,
    lateness,
    rank_summaries,
    readings,
    series,
    telemetry_series,
    timeline,
    typical_arrival,
)
from .communication import (
    MessageCost,
    bandwidth_points,
    bus_factor,
    communication_facts,
    large_bus_gb_per_s,
    latency_and_rate,
    message_cost,
    transfers,
    wait_and_transfer_ms,
)
from .gpus import device_errors, gpu_facts, memory_of_gpu, rank_gpus
from .hosts import Cores, host_cores, host_facts
from .job import asleep_shares, ddp_facts, job_facts, loader_facts, users_line
from .links import slow_link_ranks
from .steps import outstanding, step_facts, window_cost
