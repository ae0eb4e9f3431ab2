"""Compute facts and chart data from step logs, windows and telemetry.

Stages, each with a frozen result: align the recordings, build the graphs and choose the primary one, measure, attribute, price. The
facts are built once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from ddpdoctor.measure.align import align_logs, exclude_suspended
from ddpdoctor.measure.attribution import attribute
from ddpdoctor.measure.caveats import caveats
from ddpdoctor.measure.costs import (
    Context,
    Costs,
    RareSource,
    ReducerCosts,
    arrival_facts,
    costs_under,
    favoured_cap_bytes,
    price_all,
)
from ddpdoctor.measure.facts import Facts, GpuFacts, LateFacts, SharedFacts
from ddpdoctor.measure.flames import flames
from ddpdoctor.measure.graph import Graphs, all_excluded_steps, build_graphs, loader_limit_ns, python_parts
from ddpdoctor.measure.memory import Memory, memory_of
from ddpdoctor.measure.metrics import (
    MessageCost,
    added_by_profiler,
    asleep_shares,
    bandwidth_points,
    bucket_facts,
    communication_facts,
    critical_breakdown,
    data_waits_ms,
    ddp_facts,
    gpu_facts,
    host_cores,
    host_facts,
    job_facts,
    loader_facts,
    longest_steps_note,
    message_cost,
    rank_summaries,
    reducer_work,
    series,
    step_facts,
    throttled_beyond_others,
    timeline,
    with_data_wait_of,
)
from ddpdoctor.measure.runfacts import HangFacts
from ddpdoctor.measure.sourcelines import (
    LogSourceLines,
    SourceLines,
    WindowSourceLines,
    WorkersWork,
    with_worker_lines,
    with_workers,
    work_of_workers,
)
from ddpdoctor.measure.steplog import RankLog, StepPattern
from ddpdoctor.measure.summary import Drawn, RankSummary, Speaker
from ddpdoctor.measure.taxonomy import RARE_ON_DEVICE, RARE_ON_HOST
from ddpdoctor.measure.telemetry import HostTelemetry
from ddpdoctor.measure.wholerun import AttemptRecord, Launch, run_account, run_facts
from ddpdoctor.measure.window import Window, with_bucket_sizes
from ddpdoctor.stages import WINDOWS_READ, Progress, Stage, no_progress, progress_counter


class Measurement(msgspec.Struct, frozen=True):
    """Result of measuring a run."""

    facts: Facts
    graphs: Graphs
    logs: Sequence[RankLog]
    """All logs, on one clock."""
    drawn: Drawn
    notes: list[str] = msgspec.field(default_factory=list)
    set_aside: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of excluded steps, by reason. With ``facts.steps.measured`` they add up to ``facts.steps.seen``."""


def measure(
    logs: Sequence[RankLog],
    windows: Sequence[Window],
    telemetry: Mapping[str, HostTelemetry],
    hang: HangFacts | None = None,
    progress: Progress = no_progress,
    launches: Mapping[str, Launch] | None = None,
    attempts: Sequence[AttemptRecord] = (),
) -> Measurement:
    """Measure a run. ``logs`` and ``windows`` are ordered by rank; at most one of them may be empty. ``hang``: whether and how the job
    stopped. ``launches``: when the launcher of each host started and ended, by host name. ``attempts``: all attempts of the run."""
    graphs, recorded, notes = _aligned_graphs(logs, windows, telemetry, progress)
    excluded = all_excluded_steps(graphs.timing, recorded)
    report = progress_counter(progress, Stage.MEASURE)
    report(0, 5)
    profiler_ns = _added_by_profiler(graphs)
    profiled_ratio = 1.0 if not profiler_ns else 1.0 / (1.0 - profiler_ns / graphs.primary.mean_cycle_ns)
    gpu = gpu_facts(graphs.windows, graphs.logs, telemetry, profiled_ratio)
    report(1, 5)
    parts = python_parts(graphs.logs, graphs.windows, graphs.operator_shares)
    log_lines = LogSourceLines(graphs.logs, parts)
    account = run_account(
        graphs.logs,
        graphs.log.why if graphs.log else {},
        launches or {},
        is_first=not attempts or attempts[0].is_measured,
        is_last=not attempts or attempts[-1].is_measured,
    )
    workers_work = {log.rank: work for log in graphs.logs if (work := work_of_workers(log)) is not None}
    patterns = account.patterns if account else []
    context = _context(graphs, log_lines, telemetry, patterns, workers_work, profiler_ns)
    memory = memory_of(logs, telemetry)
    report(2, 5)
    ranks = _summaries(graphs, memory)
    report(3, 5)
    drawn = Drawn(
        speaker=Speaker(graphs.recording, graphs.why),
        ranks=ranks,
        series=series(graphs.log if graphs.log is not None else graphs.primary),
        timeline=timeline(graphs.primary, graphs.logs, graphs.windows),
        flames=flames(graphs.log, log_lines.samples, ranks) if graphs.log is not None else [],
        bandwidth=[] if graphs.window is None else bandwidth_points(graphs.window, _hosts(graphs.windows)),
    )
    report(4, 5)
    costs = _with_worker_lines(
        price_all(context, progress_counter(progress, Stage.PRICE)), graphs.logs, workers_work
    )
    return Measurement(
        facts=replace(
            _facts(
                graphs, context, costs, gpu, telemetry, excluded, hang or HangFacts(), memory, workers_work
            ),
            run=run_facts(account, graphs.logs, launches or {}, log_lines, attempts),
        ),
        graphs=graphs,
        logs=recorded,
        drawn=drawn,
        notes=[*notes, *longest_steps_note(graphs.timing), *caveats(graphs, profiler_ns), *memory.notes],
        set_aside=excluded,
    )


def summaries(
    logs: Sequence[RankLog],
    windows: Sequence[Window],
    telemetry: Mapping[str, HostTelemetry],
    progress: Progress = no_progress,
) -> list[RankSummary]:
    """Return the summaries of the ranks as :func:`measure` does, without attribution and pricing."""
    graphs, _, _ = _aligned_graphs(logs, windows, telemetry, progress)
    return _summaries(graphs, memory_of(logs, telemetry))


def _aligned_graphs(
    logs: Sequence[RankLog],
    windows: Sequence[Window],
    telemetry: Mapping[str, HostTelemetry],
    progress: Progress,
) -> tuple[Graphs, Sequence[RankLog], list[str]]:
    """The graphs, the logs on one clock, and notes on set clocks and suspended processes."""
    report = progress_counter(progress, Stage.ALIGN, begin=WINDOWS_READ)
    report(0, 2)
    aligned, set_clocks = align_logs(logs)
    recorded, suspended = exclude_suspended(aligned, telemetry)
    report(1, 2)
    graphs = build_graphs(recorded, with_bucket_sizes(windows, _bucket_bytes(recorded)))
    return graphs, recorded, [*set_clocks, *suspended]


def _added_by_profiler(graphs: Graphs) -> float:
    """ns that the profiler adds to each cycle of the primary graph; 0 unless that is a window with devices and there are step logs."""
    has_both = graphs.on_device and graphs.log_beside_window is not None
    return added_by_profiler(graphs.primary, graphs.timing) if has_both and graphs.primary.groups else 0.0


def _context(
    graphs: Graphs,
    log_lines: LogSourceLines,
    telemetry: Mapping[str, HostTelemetry],
    patterns: Sequence[StepPattern],
    workers_work: Mapping[int, WorkersWork],
    profiler_ns: float,
) -> Context:
    graph, logs, windows = graphs.primary, graphs.logs, graphs.windows
    device_run = _device_run(graphs)
    reducers = reducer_work(logs, windows) if graphs.primary_is_log else []
    lines: SourceLines = log_lines
    if graphs.primary_is_window:
        same_ranks = [window.rank for window in windows] == [log.rank for log in logs]
        lines = WindowSourceLines(windows, (log_lines, graphs.timing.numbers) if same_ranks else None)
    return Context(
        graph=graph,
        attribution=attribute(graph, short=not logs and all(window.on_device for window in windows)),
        lines=lines,
        mean_step_ms=graphs.timing.mean_cycle_ns / 1e6 if graphs.timing.groups else None,
        log_graph=graphs.log_beside_window,
        logs=logs,
        patterns=patterns,
        rare_sources=_rare_sources(graphs, log_lines) if device_run is None else [device_run],
        device_run=device_run,
        loader_limit_ms=_loader_limit_ms(logs, workers_work),
        throttled_ranks=throttled_beyond_others(logs, telemetry),
        reducer=ReducerCosts(
            synced_ns=tuple(work.whole_ns if work else 0.0 for work in reducers),
            issue_ns=tuple(work.issue_ns for work in reducers if work),
        ),
        reductions=bucket_facts(graph, graphs.log, graphs.window, logs, windows),
        message=MessageCost() if graphs.window is None else message_cost(graphs.window, _hosts(windows)),
        host_timed=graphs.primary_is_log,
        profiler_ns=profiler_ns,
        cores=host_cores(telemetry, logs),
        asleep=asleep_shares(logs)
        | {rank: share for rank, work in workers_work.items() if (share := work.asleep_share) is not None},
    )


def _with_worker_lines(
    costs: Costs, logs: Sequence[RankLog], workers_work: Mapping[int, WorkersWork]
) -> Costs:
    """The costs; those of waiting for data with the source lines of the loader's workers on the rank that waits longest."""
    updated = {}
    for path in ("shared.data", "late.data"):
        if (cost := costs.get(path)) is not None:
            updated[path] = with_worker_lines(cost, _work_of_slowest_rank(logs, workers_work, cost.ranks))
    return costs | updated


def _work_of_slowest_rank(
    logs: Sequence[RankLog], workers_work: Mapping[int, WorkersWork], ranks: Sequence[int] | None = None
) -> WorkersWork | None:
    """The workers' work on the rank that waits longest for data, among ``ranks`` (None: all)."""
    waits = {rank: ms for rank, ms in data_waits_ms(logs).items() if ranks is None or rank in ranks}
    return workers_work.get(max(waits, key=lambda rank: waits[rank], default=-1))


def _loader_limit_ms(logs: Sequence[RankLog], workers_work: Mapping[int, WorkersWork]) -> float:
    """See :attr:`Context.loader_limit_ms`."""
    known = [
        loader_limit_ns(log) for log in logs if log.rank in workers_work and workers_work[log.rank].has_cores
    ]
    return max((ns / 1e6 for ns in known if ns is not None), default=0.0)


def _rare_sources(graphs: Graphs, log_lines: LogSourceLines) -> list[RareSource]:
    """Graphs of the whole run, for rare events that a window of a few steps does not show, if there is no device time, in which what hosts
    do counts as far as devices wait for it."""
    beside = graphs.log_beside_window
    return [] if beside is None else [RareSource(beside, log_lines, RARE_ON_HOST)]


def _device_run(graphs: Graphs) -> RareSource | None:
    """The whole run in device time, if that is longer than the window."""
    if graphs.device is None or graphs.device.cycles <= graphs.primary.cycles:
        return None
    return RareSource(graphs.device, LogSourceLines(graphs.device_logs), RARE_ON_DEVICE)


def _facts(
    graphs: Graphs,
    context: Context,
    costs: Costs,
    gpu: GpuFacts,
    telemetry: Mapping[str, HostTelemetry],
    set_aside: Mapping[str, int],
    hang: HangFacts,
    memory: Memory,
    workers_work: Mapping[int, WorkersWork],
) -> Facts:
    logs, windows, graph = graphs.logs, graphs.windows, graphs.primary
    cap_bytes = favoured_cap_bytes(context, costs)
    job = job_facts(logs, windows, len(graph.ranks))
    return Facts(
        job=job,
        steps=step_facts(
            graphs.timing,
            graphs.timing.cycles + sum(set_aside.values()),
            graphs.operators_seen,
            context.attribution.inputs_explain,
            job.world_size,
        ),
        late=LateFacts(**costs_under("late", costs)),
        shared=SharedFacts(**costs_under("shared", costs)),
        arrivals=arrival_facts(graph, costs),
        communication=communication_facts(graph, graphs.window, logs, windows, context.message.latency_us),
        buckets=replace(context.reductions, favoured_cap_bytes=cap_bytes),
        loader=with_workers(
            loader_facts(logs, windows, asleep_shares(logs)), _work_of_slowest_rank(logs, workers_work)
        ),
        ddp=ddp_facts(logs, windows, context.message.latency_us, context.reductions.syncs_per_step or 1.0),
        gpu=gpu,
        host=host_facts(telemetry, logs, graphs.log or graph, context.cores),
        memory=memory.facts,
        hang=hang,
        breakdown=_breakdown(context),
    )


def _breakdown(context: Context) -> dict[str, float]:
    breakdown = critical_breakdown(context.graph, context.profiler_ns)
    run = context.device_run
    return breakdown if run is None else with_data_wait_of(breakdown, run.graph)


def _summaries(graphs: Graphs, memory: Memory) -> list[RankSummary]:
    if graphs.primary_is_log:
        hosts = _hosts(graphs.logs)
        devices = [log.record.info.get("device") for log in graphs.logs]
    else:
        hosts = _hosts(graphs.windows)
        found = [window.trace.meta.devices for window in graphs.windows]
        devices = [str(of_rank[0].get("name")) if of_rank else None for of_rank in found]
    return rank_summaries(graphs.primary, hosts, devices, memory.ranks)


def _hosts(ranks: Sequence[RankLog] | Sequence[Window]) -> list[str]:
    return [rank.host for rank in ranks]


def _bucket_bytes(logs: Sequence[RankLog]) -> list[float]:
    modules = [ddp for log in logs[:1] for ddp in log.record.info.get("ddp") or []]
    return [float(size) for size in modules[0].get("bucket_bytes") or []] if len(modules) == 1 else []
