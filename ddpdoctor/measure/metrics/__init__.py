"""What is measured without asking for causes: times, breakdown, communication, devices, machines, settings.

In: the graph, the logs and windows behind it, telemetry. Out: groups of facts, and what reports draw. The idea: one function
of one module builds a group of facts, whole; nothing here is priced and nobody is accused. What is known only from elsewhere,
such as a favoured bucket size, is an argument.
"""

from .breakdown import critical_breakdown, cycle_breakdown, rank_breakdown
from .buckets import bucket_facts, reducer_work
from .charts import (
    lateness,
    lateness_ns,
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
from .job import asleep_shares, creation_line, ddp_facts, job_facts, loader_facts
from .links import slow_link_ranks
from .steps import longest_steps_note, step_facts, window_cost
