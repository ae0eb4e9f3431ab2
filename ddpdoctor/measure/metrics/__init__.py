"""Measurements that need no causes: times, breakdown, communication, devices, hosts, settings.

In: the graph, its logs and windows, telemetry. Out: groups of facts, and data for charts. One function builds each group of facts;
nothing is priced here, and no rank is named as a cause. Values from other stages, such as the best bucket size, are arguments.
"""

from .buckets import bucket_facts, reducer_work
from .charts import (
    lateness,
    latest_ns,
    rank_summaries,
    readings,
    series,
    telemetry_series,
    timeline,
)
from .communication import (
    MessageCost,
    bandwidth_points,
    bus_factor,
    communication_facts,
    large_bus_gb_per_s,
    latency_and_rate,
    message_cost,
    slow_link_ranks,
    transfers,
    wait_and_transfer_ms,
)
from .gpus import device_errors, gpu_facts, memory_of_gpu, program_errors, rank_gpus, throttled_beyond_others
from .hosts import Cores, host_cores, host_facts
from .job import asleep_shares, creation_line, data_waits_ms, ddp_facts, fetch_share, job_facts, loader_facts
from .steps import (
    added_by_profiler,
    critical_breakdown,
    critical_work,
    cycle_breakdown,
    host_idle_ns,
    longest_steps_note,
    rank_breakdown,
    step_facts,
    window_cost,
    with_data_wait_of,
)
