"""Everything together: step logs, windows and telemetry → facts and what reports draw.

One flow of stages, each with a frozen result: what was read is aligned, becomes graphs of which one speaks, is measured,
attributed and priced; then facts are built, once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ddpdoctor.measure.align import align_logs, set_suspended_aside
from ddpdoctor.measure.attribution import excess
from ddpdoctor.measure.costs import (
    Context,
    Costs,
    MessageCost,
    RareSource,
    ReducerCosts,
    late_facts,
    price_all,
    saved_by_buckets,
    shared_facts,
    what_if_facts,
)
from ddpdoctor.measure.facts import (
    BucketFacts,
    CommunicationFacts,
    DdpFacts,
    Facts,
    JobFacts,
    LoaderFacts,
)
from ddpdoctor.measure.graph import Graph, Graphs, all_set_aside, build_graphs, python_parts
from ddpdoctor.measure.metrics import (
    bandwidth_points,
    bucket_facts,
    bucket_settings,
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
    searches_unused,
    series,
    size_buckets,
    slow_link_ranks,
    step_facts,
    timeline,
    wait_and_transfer_ms,
)
from ddpdoctor.measure.sourcelines import Lines, LogLines, TraceLines
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.summary import BandwidthPoint, RankSummary, Series, Timeline
from ddpdoctor.measure.taxonomy import RARE_ON_DEVICE, RARE_ON_HOST
from ddpdoctor.measure.telemetry import HostTelemetry
from ddpdoctor.measure.window import Window
from ddpdoctor.trace import classify


@dataclass(frozen=True)
class Measurement:
    """What was measured."""

    facts: Facts
    graphs: Graphs
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
    """Measure a run. ``logs`` and ``windows`` are ordered by rank; either may be empty, not both."""
    notes: list[str] = []
    align_logs(logs, notes)
    notes += set_suspended_aside(logs, telemetry)
    size_buckets(windows, _bucket_bytes(logs))
    graphs = build_graphs(logs, windows)
    aside = all_set_aside(graphs.told, logs)
    context = _context(graphs, telemetry)
    facts = _facts(graphs, context, price_all(context), telemetry, sum(aside.values()))
    return Measurement(
        facts=facts,
        graphs=graphs,
        ranks=_summaries(graphs),
        series=series(graphs.log if graphs.log is not None else graphs.speaking),
        timeline=timeline(graphs.speaking, graphs.logs, graphs.windows),
        bandwidth=bandwidth_points(graphs.window) if graphs.window is not None else [],
        notes=[*notes, *outstanding(graphs.told), *_notes(graphs)],
        set_aside=aside,
    )


def _context(graphs: Graphs, telemetry: Mapping[str, HostTelemetry]) -> Context:
    """What is known before anything is priced."""
    graph, logs, windows = graphs.speaking, graphs.logs, graphs.windows
    reducers = reducer_work(logs, windows) if graphs.log_speaks else []
    buckets = bucket_settings(logs, graph) if logs else BucketFacts()
    if windows and graphs.window is not None:
        buckets = bucket_facts(graphs.window, windows, buckets)
    latency_us, bytes_per_ns = message_cost(graphs.window) if graphs.window is not None else (None, None)
    return Context(
        graph=graph,
        attribution=excess(graph, short=not logs and all(window.on_device for window in windows)),
        lines=_lines(graphs),
        mean_step_ms=step_facts(graphs.told).mean_ms,
        logs=logs,
        windows=windows,
        rare_sources=_rare_sources(graphs),
        throttled_ranks=gpu_telemetry(gpu_facts(windows), logs, telemetry).throttled_ranks or (),
        reducer=ReducerCosts(
            synced_ns=tuple(work.whole_ns if work else 0.0 for work in reducers),
            issue_ns=tuple(work.issue_ns for work in reducers if work),
        ),
        buckets=buckets,
        message=MessageCost(latency_us, bytes_per_ns),
        speaks_of_hosts=graphs.log_speaks,
    )


def _lines(graphs: Graphs) -> Lines:
    if graphs.window_speaks:
        return TraceLines(graphs.windows)
    return LogLines(graphs.logs, python_parts(graphs.logs, graphs.windows, graphs.operator_shares))


def _rare_sources(graphs: Graphs) -> list[RareSource]:
    """The window shows a few steps; what stops a host, or slows a device, now and then is in the logs of the whole run."""
    sources = []
    if graphs.window_speaks and graphs.log is not None and graphs.log.groups:
        sources.append(RareSource(graphs.log, LogLines(graphs.logs), RARE_ON_HOST))
    if graphs.device is not None:
        sources.append(RareSource(graphs.device, LogLines(graphs.device_logs), RARE_ON_DEVICE))
    return sources


def _facts(
    graphs: Graphs, context: Context, costs: Costs, telemetry: Mapping[str, HostTelemetry], set_aside: int
) -> Facts:
    logs, windows, graph = graphs.logs, graphs.windows, graphs.speaking
    favoured_cap_bytes = saved_by_buckets(context).favoured_cap_bytes
    steps = step_facts(graphs.told)
    return Facts(
        job=job_facts(logs) if logs else _job_of_windows(windows),
        steps=msgspec.structs.replace(
            steps,
            input_explains=context.attribution.inputs_explain,
            operators_seen=graphs.operators_seen,
            seen=steps.measured + set_aside,
        ),
        late=late_facts(costs),
        shared=shared_facts(costs),
        communication=_communication(graphs, context),
        buckets=msgspec.structs.replace(context.buckets, favoured_cap_bytes=favoured_cap_bytes),
        loader=loader_facts(logs, graph) if logs else _loader_of_windows(windows),
        ddp=_with_search(ddp_facts(logs), windows, costs.get("ddp.search_ms")),
        gpu=gpu_telemetry(gpu_facts(windows), logs, telemetry),
        host=host_facts(telemetry, logs, graphs.log or graph),
        what_if=what_if_facts(context, graphs.window, favoured_cap_bytes),
        breakdown=critical_breakdown(graph),
    )


def _communication(graphs: Graphs, context: Context) -> CommunicationFacts:
    logs, windows, graph = graphs.logs, graphs.windows, graphs.speaking
    communication = communication_facts(graphs.window or graph, windows)
    compared = graphs.window if graphs.window is not None and graphs.window.matched else graph
    hosts = [w.host for w in windows] if compared is graphs.window else [log.host for log in logs]
    communication = msgspec.structs.replace(
        communication,
        slow_link_ranks=slow_link_ranks(compared, hosts),
        latency_us=context.message.latency_us,
    )
    if graphs.log_speaks and graph.matched:
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
    return communication


def _with_search(known: DdpFacts, windows: Sequence[Window], ms: object) -> DdpFacts:
    """Settings of DDP, with what the windows tell of its search for unused parameters."""
    searches = known.find_unused_parameters
    if searches is None:
        searches = searches_unused(windows)
    return msgspec.structs.replace(known, find_unused_parameters=searches, search_ms=ms)


def _summaries(graphs: Graphs) -> list[RankSummary]:
    """Of the whole run where hosts tell when work was done, else of the graph that speaks."""
    if graphs.log is not None and (graphs.log_speaks or not graphs.on_device):
        hosts = [log.host for log in graphs.logs]
        return rank_summaries(graphs.log, hosts, [log.record.info.get("device") for log in graphs.logs])
    hosts = [window.host for window in graphs.windows]
    return rank_summaries(graphs.speaking, hosts, [_device_name(window) for window in graphs.windows])


def _bucket_bytes(logs: Sequence[RankLog]) -> list[float]:
    modules = [ddp for log in logs[:1] for ddp in log.record.info.get("ddp") or []]
    return [float(size) for size in modules[0].get("bucket_bytes") or []] if len(modules) == 1 else []


def _device_name(window: Window) -> str | None:
    devices = window.trace.meta.devices
    return str(devices[0].get("name")) if devices else None


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


def _notes(graphs: Graphs) -> list[str]:
    logs, windows, window_graph = graphs.logs, graphs.windows, graphs.window
    notes = list(graphs.speaking.notes)
    if graphs.speaking is window_graph and window_graph is not None and window_graph.refused:
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
    if graphs.on_device and logs and not windows and not logs[0].on_device_time:
        notes.append(
            "No profiler window was recorded: on a GPU, step logs show when the host issued work, not when it ran. Causes are approximate."
        )
    return notes
