"""Everything together: step logs, windows and telemetry → facts and what reports draw."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ddpdoctor.rundir import EventKind
from ddpdoctor.trace import classify

from .align import align_logs, set_suspended_aside
from .attribution import attribute
from .costs import (
    Pricing,
    bucket_costs,
    bucket_settings,
    disturbed_ns,
    lone_evaluation,
    merged,
    rare_costs,
    refine,
    what_if_facts,
    with_evaluations,
)
from .facts import BucketFacts, DdpFacts, Facts, JobFacts, LateFacts, LoaderFacts, SharedFacts
from .graph import Graph, all_set_aside, graph_of_logs, graph_of_windows, operator_shares, python_parts
from .metrics import (
    bandwidth_points,
    bucket_facts,
    communication_facts,
    critical_breakdown,
    ddp_facts,
    gpu_facts,
    gpu_telemetry,
    host_facts,
    job_facts,
    loader_facts,
    message_cost,
    outstanding,
    rank_summaries,
    reducer_work,
    search_ms,
    searches_unused,
    series,
    size_buckets,
    slow_link_ranks,
    step_facts,
    timeline,
    wait_and_transfer_ms,
)
from .sourcelines import LogSourceLines, SourceLines, WindowSourceLines
from .steplog import RankLog, in_device_time
from .summary import BandwidthPoint, RankSummary, Series, Timeline
from .taxonomy import RARE_ON_DEVICE
from .telemetry import HostTelemetry
from .window import Window


@dataclass(frozen=True)
class Measurement:
    """What was measured."""

    facts: Facts
    graph: Graph
    ranks: list[RankSummary]
    series: Series
    timeline: Timeline | None
    bandwidth: list[BandwidthPoint]
    notes: list[str] = field(default_factory=list)
    set_aside: dict[str, int] = field(default_factory=dict)
    """Recorded steps that are not among ``facts.steps.measured``, by reason; with those they are all that were seen."""


def measure(
    logs: Sequence[RankLog], windows: Sequence[Window], telemetry: Mapping[str, HostTelemetry]
) -> Measurement:
    """Measure a run. ``logs`` and ``windows`` are ordered by rank; either may be empty, not both.

    The whole run speaks where the hosts' clocks tell when work was done: jobs on CPUs. With a device the host
    only issues work, so the profiled window speaks, and the step logs give the step times, settings and
    source lines. Where the run was timed by CUDA events, it speaks in device time where there is no window, and of
    what slowed a device outside it.
    """
    notes: list[str] = []
    align_logs(logs, notes)
    notes += set_suspended_aside(logs, telemetry)
    recorded = logs
    timed = in_device_time(logs)
    on_device = (
        timed is not None
        or any(w.on_device for w in windows)
        or any(str(log.record.info.get("device") or "").startswith("cuda") for log in logs)
    )
    size_buckets(windows, _bucket_bytes(logs))
    window_graph = graph_of_windows(windows)[0] if windows else None
    shares = operator_shares(logs, windows)
    seen = on_device and window_graph is not None and window_graph.cycles > 0
    device_graph = graph_of_logs(timed) if timed is not None else None
    if timed is not None and not seen and not _meets_on_hosts(logs):
        logs, log_graph = timed, device_graph
    else:
        log_graph = graph_of_logs(logs, shares) if logs else None
    use_window = log_graph is None or seen
    graph = window_graph if use_window and window_graph is not None else log_graph
    assert graph is not None
    lines: SourceLines = (
        WindowSourceLines(windows)
        if use_window
        else LogSourceLines(logs, python_parts(logs, windows, shares))
    )
    facts = _facts(graph, log_graph, window_graph, logs, windows, lines, telemetry)
    if timed is not None and device_graph is not None and use_window and facts.steps.mean_ms:
        seldom = rare_costs(device_graph, LogSourceLines(timed), RARE_ON_DEVICE)[0]
        late, _ = merged(facts.late, facts.shared, (seldom, {}), facts.steps.mean_ms)
        facts = msgspec.structs.replace(facts, late=late)
    operators_seen = use_window or len(shares) == len(logs)
    aside = all_set_aside(_told(graph, log_graph), recorded)
    seen_steps = facts.steps.measured + sum(aside.values())
    facts = msgspec.structs.replace(
        facts, steps=msgspec.structs.replace(facts.steps, operators_seen=operators_seen, seen=seen_steps)
    )
    notes += outstanding(_told(graph, log_graph))
    notes += _notes(graph, window_graph, windows, logs, on_device)
    drawn = log_graph if log_graph is not None and not on_device else graph
    hosts = [log.host for log in logs] if drawn is log_graph else [w.host for w in windows]
    devices = (
        [log.record.info.get("device") for log in logs]
        if drawn is log_graph
        else [_device_name(w) for w in windows]
    )
    return Measurement(
        facts,
        graph,
        rank_summaries(drawn, hosts, devices),
        series(log_graph if log_graph is not None else graph),
        timeline(graph, logs, windows),
        bandwidth_points(window_graph) if window_graph is not None else [],
        notes,
        aside,
    )


def _told(graph: Graph, log_graph: Graph | None) -> Graph:
    """Whose steps' times are told."""
    return log_graph if log_graph is not None and log_graph.groups else graph


def _meets_on_hosts(logs: Sequence[RankLog]) -> bool:
    """Whether steps usually hold collectives that Python called, which logs in device time leave out."""
    calls = [
        any(event.kind in (EventKind.COLLECTIVE, EventKind.BARRIER) for event in step.events)
        for log in logs
        for step in log.steps
    ]
    return sum(calls) * 2 > len(calls)


def _bucket_bytes(logs: Sequence[RankLog]) -> list[float]:
    modules = [ddp for log in logs[:1] for ddp in log.record.info.get("ddp") or []]
    return [float(size) for size in modules[0].get("bucket_bytes") or []] if len(modules) == 1 else []


def _device_name(window: Window) -> str | None:
    devices = window.trace.meta.devices
    return str(devices[0].get("name")) if devices else None


def _facts(
    graph: Graph,
    log_graph: Graph | None,
    window_graph: Graph | None,
    logs: Sequence[RankLog],
    windows: Sequence[Window],
    lines: SourceLines,
    telemetry: Mapping[str, HostTelemetry],
) -> Facts:
    gpu = gpu_telemetry(gpu_facts(windows), logs, telemetry)
    buckets = bucket_settings(logs, graph) if logs else BucketFacts()
    steps = step_facts(_told(graph, log_graph))
    if windows and window_graph is not None:
        buckets = bucket_facts(window_graph, windows, buckets)
    late, shared = LateFacts(), SharedFacts()
    found = attribute(graph, short=not logs and all(window.on_device for window in windows))
    steps = msgspec.structs.replace(steps, input_explains=found.inputs_explain)
    latency = rate = None
    reducers = reducer_work(logs, windows) if graph is log_graph else []
    synced_ns = [work.whole_ns if work else 0.0 for work in reducers] or None
    if graph.groups:
        pricing = Pricing(graph, found, lines, synced_ns)
        late = refine(pricing.late(), graph, gpu.throttled_ranks or ())
        shared = pricing.shared()
        starts = with_evaluations(shared.data_epoch_start, logs, steps.mean_ms, lines)
        shared = msgspec.structs.replace(shared, data_epoch_start=starts)
    if graph is not log_graph and log_graph is not None and log_graph.groups and steps.mean_ms:
        # The window shows a few steps; what stops a host now and then is in the log of the whole run.
        late, shared = merged(late, shared, rare_costs(log_graph, LogSourceLines(logs)), steps.mean_ms)
    late = msgspec.structs.replace(late, evaluation=lone_evaluation(logs, steps.mean_ms))
    communication = communication_facts(window_graph or graph, windows)
    compared = window_graph if window_graph is not None and window_graph.matched else graph
    hosts = [w.host for w in windows] if compared is window_graph else [log.host for log in logs]
    communication = msgspec.structs.replace(communication, slow_link_ranks=slow_link_ranks(compared, hosts))
    if graph is log_graph and graph.matched:
        wait, transfer = wait_and_transfer_ms(graph)
        communication = msgspec.structs.replace(
            communication,
            wait_ms=wait,
            transfer_ms=transfer,
            matched=graph.matched,
            unmatched=graph.unmatched,
            bytes_per_step=communication.bytes_per_step or _bytes(graph),
        )
        if communication.total_transfer_ms is not None and communication.total_transfer_ms < (
            transfer or 0.0
        ):
            # A few steps of less transfer than the run exposes on average do not tell how much of it is hidden.
            communication = msgspec.structs.replace(communication, total_transfer_ms=None, hidden_share=None)
    if window_graph is not None:
        latency, rate = message_cost(window_graph)
        communication = msgspec.structs.replace(communication, latency_us=latency)
        mean_ms = graph.mean_cycle_ns / 1e6 if graph.groups else 0.0
        small, unhidden, cap = bucket_costs(
            buckets,
            latency,
            rate,
            shared.communication,
            mean_ms,
            float(np.median([work.issue_ns for work in reducers if work] or [0.0])),
            disturbed_ns(graph) / 1e6 if graph is log_graph else 0.0,
        )
        shared = msgspec.structs.replace(shared, small_buckets=small, no_overlap=unhidden)
        buckets = msgspec.structs.replace(buckets, favoured_cap_bytes=cap)
    return Facts(
        job=job_facts(logs) if logs else _job_of_windows(windows),
        steps=steps,
        late=late,
        shared=shared,
        communication=communication,
        buckets=buckets,
        loader=loader_facts(logs, graph) if logs else _loader_of_windows(windows),
        ddp=_with_search(
            ddp_facts(logs), windows, search_ms(windows, latency, buckets.syncs_per_step or 1.0)
        ),
        gpu=gpu,
        host=host_facts(telemetry, logs, log_graph or graph),
        what_if=what_if_facts(graph, found, window_graph, buckets, latency, rate, synced_ns),
        breakdown=critical_breakdown(graph),
    )


def _with_search(known: DdpFacts, windows: Sequence[Window], ms: float | None) -> DdpFacts:
    """Settings of DDP, with what the windows tell of its search for unused parameters."""
    searches = known.find_unused_parameters
    if searches is None:
        searches = searches_unused(windows)
    return msgspec.structs.replace(known, find_unused_parameters=searches, search_ms=ms)


def _bytes(graph: Graph) -> float | None:
    sums = [float(np.nansum(group.message_bytes)) for group in graph.groups]
    return sum(sums) / max(graph.cycles, 1) or None


_DATA_PARALLEL = re.compile(r"(?<![A-Za-z])DataParallel\.forward|nn\.Module: DataParallel_\d")
"""``torch.nn.DataParallel`` as it stands in the name of its annotation or of a Python frame, not another class whose name
ends so: DistributedDataParallel, FullyShardedDataParallel."""


def _loader_of_windows(windows: Sequence[Window]) -> LoaderFacts:
    """What a trace says of the loader: whether it makes batches in the training process itself, and the waits."""
    alone = any(classify.IN_PROCESS in name for window in windows for name in window.trace.names)
    waits = []
    for window in windows:
        batches = classify.next_batches(window.trace)
        if batches.any() and window.steps:
            waits.append(float(window.trace.duration_ns[batches].sum()) / 1e6 / len(window.steps))
    return LoaderFacts(
        num_workers=0 if alone else None,
        wait_ms=float(np.median(waits)) if waits else None,
        longest_wait_ms=max(waits, default=None),
    )


def _job_of_windows(windows: Sequence[Window]) -> JobFacts:
    metas = [w.trace.meta for w in windows]
    devices = [d for meta in metas for d in meta.devices]
    forward = any("DistributedDataParallel.forward" in n for w in windows for n in w.trace.names)
    return JobFacts(
        world_size=next((m.world_size for m in metas if m.world_size is not None), None),
        ranks_seen=len(windows),
        hosts=len({m.host for m in metas if m.host}) or None,
        backend=next((m.backend for m in metas if m.backend), None),
        device="cuda" if any(w.on_device for w in windows) else "cpu",
        device_name=str(devices[0].get("name")) if devices else None,
        torch=next((m.torch_version for m in metas if m.torch_version), None),
        nccl=next((m.versions.get("nccl_version") for m in metas if m.versions.get("nccl_version")), None),
        is_ddp=forward or None,
        data_parallel=any(_DATA_PARALLEL.search(n) for w in windows for n in w.trace.names) or None,
    )


def _notes(
    graph: Graph,
    window_graph: Graph | None,
    windows: Sequence[Window],
    logs: Sequence[RankLog],
    on_device: bool,
) -> list[str]:
    notes = list(graph.notes)
    if graph is window_graph and window_graph is not None and window_graph.refused:
        notes.append(
            f"Collectives could not be matched over the ranks: {window_graph.refused}. "
            "Waiting and transfer cannot be told apart, and no rank is accused."
        )
    if len(windows) == 1 and len(windows[0].comms) and not logs:
        notes.append(
            "One rank only: whether its collectives waited for a late rank or transferred slowly cannot be told "
            "from this trace. Collect the same steps on all ranks."
        )
    world = next((w.trace.meta.world_size for w in windows if w.trace.meta.world_size), None)
    if not logs and world is not None and 1 < len(windows) < world:
        notes.append(
            f"Traces of {len(windows)} of {world} ranks: a rank that is not here may have been the last to arrive, "
            "so transfer times are upper bounds."
        )
    nameless = [window.trace.meta.source for window in windows if not window.trace.meta.rank_from]
    if nameless and not logs:
        notes.append(
            f"{nameless[0]}{' and others' if len(nameless) > 1 else ''}: the trace does not say of which rank and job it "
            "is (no distributedInfo), so world size and backend are unknown."
        )
    if on_device and logs and not windows and not logs[0].on_device_time:
        notes.append(
            "No profiler window was recorded: on a GPU, step logs show when the host issued work, not when it ran. Causes are approximate."
        )
    return notes
