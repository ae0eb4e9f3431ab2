"""Facts about the job, its loader, and DDP's settings and search for unused parameters, from the ranks' records or, without step logs,
from the traces."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.facts import DdpFacts, JobFacts, LoaderFacts
from ddpdoctor.measure.graph import issue_time_ns
from ddpdoctor.measure.numerics import covered
from ddpdoctor.measure.places import Where
from ddpdoctor.measure.steplog import WARM_UP_STEPS, RankLog, first
from ddpdoctor.measure.window import Window, event_union, in_steps, main_lane
from ddpdoctor.rundir.packages import is_well_known
from ddpdoctor.trace import classify

_READY_QUANTILE = 0.25
"""A quarter of the requests for a batch find it ready, unless the loader is slower than the loop for nearly every batch."""


def creation_line(log: RankLog, number: Any) -> Where | None:
    """Return the user's line with this number in the log's table; None if only a framework's line was recorded, as in processes that
    Lightning spawns."""
    line = log.where.get(number) if isinstance(number, int) else None
    return None if line is None or is_well_known(line.file) else line


def ddp_facts(
    logs: Sequence[RankLog], windows: Sequence[Window], latency_us: float | None, searches: float
) -> DdpFacts:
    """Return the settings of the largest DDP module of the first rank that has one. ``latency_us`` and ``searches``: see
    :func:`_search_ms`.

    If the settings do not state whether DDP searches unused parameters, that comes from the windows.
    """
    log = next((log for log in logs if log.record.info.get("ddp")), None)
    search_ms = _search_ms(windows, latency_us, searches)
    if log is None:
        return DdpFacts(find_unused_parameters=searches_unused(windows), search_ms=search_ms)
    ddp = max(log.record.info["ddp"], key=lambda module: module.get("parameters_bytes") or 0)
    stated = ddp.get("find_unused_parameters")
    known = {name: ddp.get(name) for name in DdpFacts.__struct_fields__} | {
        "find_unused_parameters": searches_unused(windows) if stated is None else stated,
        "search_ms": search_ms,
        "where": creation_line(log, ddp.get("where")),
    }
    return DdpFacts(**known)


def loader_facts(
    logs: Sequence[RankLog], windows: Sequence[Window], asleep: Mapping[int, float]
) -> LoaderFacts:
    """Return the settings of the first rank with a loader, and the waits of all ranks from the step logs; without logs, from the windows.
    ``asleep``: see :func:`asleep_shares`."""
    if not logs:
        return _loader_of_windows(windows)
    by_rank = data_waits_ms(logs)
    median_ms = float(np.median(list(by_rank.values()))) if by_rank else None
    stated = ((log, log.main_loader_settings) for log in logs)
    log, settings = next((each for each in stated if each[1] is not None), (logs[0], None))
    if settings is None:
        return LoaderFacts(wait_ms=median_ms)
    slowest = max(logs, key=lambda log: by_rank.get(log.rank, 0.0))
    known: dict[str, Any] = {
        name: settings[name] for name in LoaderFacts.__struct_fields__ if name in settings
    } | {
        "where": creation_line(log, settings.get("where")),
        "wait_ms": median_ms,
        **_ready_batches(logs),
        "fetch_share": _least_fetch_share(logs),
        "computing_share": 1 - asleep[slowest.rank] if slowest.rank in asleep else None,
    }
    return LoaderFacts(**known)


def data_waits_ms(logs: Sequence[RankLog]) -> dict[int, float]:
    """Return by rank the mean ms per step in the ``next`` of its training loaders, over the steps recorded in full after the warm-up; only
    ranks that requested batches."""
    waits_ms = {}
    for log in logs:
        waits_ns = [
            [of.duration_ns for of in step.events if of.gives_batch and log.is_of_training(of)]
            for step in log.steps[WARM_UP_STEPS:]
            if step.in_full
        ]
        if any(waits_ns):
            waits_ms[log.rank] = float(np.mean([sum(of_step) for of_step in waits_ns])) / 1e6
    return waits_ms


def asleep_shares(logs: Sequence[RankLog]) -> dict[int, float]:
    """Return by rank the share of the time in ``next`` in which its process was neither running nor runnable, over the training batches
    with that record; only ranks with such batches."""
    shares = {}
    for log in logs:
        known = [
            event
            for step in log.steps[WARM_UP_STEPS:]
            for event in step.events
            if event.gives_batch and event.asleep_ns >= 0 and log.is_of_training(event)
        ]
        whole_ns = sum(event.duration_ns for event in known)
        if whole_ns:
            shares[log.rank] = min(sum(event.asleep_ns for event in known) / whole_ns, 1.0)
    return shares


def fetch_share(taken_ns: Sequence[float]) -> float:
    """Part of the time in ``next`` that the requests would take if each batch were ready: the lower quartile of their durations,
    ``taken_ns`` [N >= 1], times their number. The durations must not all be 0."""
    return float(np.quantile(taken_ns, _READY_QUANTILE)) * len(taken_ns) / sum(taken_ns)


def _least_fetch_share(logs: Sequence[RankLog]) -> float | None:
    """The smallest :func:`fetch_share` of all ranks; None without batches."""
    shares = []
    for log in logs:
        taken_ns = [
            event.duration_ns
            for step in log.steps[WARM_UP_STEPS:]
            for event in step.events
            if event.gives_batch and log.is_of_training(event)
        ]
        if sum(taken_ns):
            shares.append(fetch_share(taken_ns))
    return min(shares, default=None)


def _ready_batches(logs: Sequence[RankLog]) -> dict[str, float]:
    """Facts on the batches that were ready at a request, on the rank with the fewest; {} if no loader shows it. Other ranks have more
    because their workers prepare batches while they wait for that rank."""
    found = []
    for log in logs:
        of_steps = [
            (step, [event.batches_ready for event in step.events if event.shows_ready_batches])
            for step in log.steps
        ]
        of_steps = [(step, ready) for step, ready in of_steps if ready]
        if of_steps:
            ready = [count for _, counts in of_steps for count in counts]
            mean, interval_ns = (
                sum(ready) / len(ready),
                sum(step.length_ns for step, _ in of_steps) / len(ready),
            )
            found.append((mean, mean * interval_ns / 1e6))
    return dict(zip(("ready_batches", "ready_ms"), min(found), strict=True)) if found else {}


def _loader_of_windows(windows: Sequence[Window]) -> LoaderFacts:
    """Loader facts from traces: whether batches are prepared in the training process, and the waits."""
    in_process = any(classify.IN_PROCESS in name for window in windows for name in window.trace.names)
    waits_ms = []
    for window in windows:
        batches = classify.next_batches(window.trace) & in_steps(window)
        if batches.any() and window.steps:
            waits_ms.append(float(window.trace.duration_ns[batches].sum()) / 1e6 / len(window.steps))
    return LoaderFacts(
        num_workers=0 if in_process else None,
        wait_ms=float(np.median(waits_ms)) if waits_ms else None,
    )


SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"
"""Traversal of the autograd graph (torch/csrc/distributed/c10d/reducer.cpp)."""
_SEARCHED = (SEARCH, "_DDPSink", "_DDPSinkBackward")
"""The traversal, and the functions around the outputs, forward and backward."""
_HOST_BOUND = 0.9
"""Ratio of issue time to step length from which on the host limits the step. It is below 1 because the launch queue is empty between
steps."""


def _search_ms(windows: Sequence[Window], latency_us: float | None, searches: float) -> float | None:
    """ms per step of searching unused parameters, with ``searches`` per step: the traversal of the graph, and a message of latency
    ``latency_us`` with the used parameters. On a device the message is sent concurrently and does not count; the traversal counts to the
    extent that the device's work does not hide it, or fully if the host limits the step. None if no window has a search."""
    per_search_ns = [
        spent_ns for window in windows if (spent_ns := _one_search_ns(window, latency_us)) is not None
    ]
    return searches * float(np.median(per_search_ns)) / 1e6 if per_search_ns else None


def _one_search_ns(window: Window, latency_us: float | None) -> float | None:
    """ns that one search costs a rank; None if its window has none."""
    trace = window.trace
    own = trace.category_mask("cpu_op") & (trace.lane == main_lane(trace))
    walks = int((own & trace.name_mask(_is_search)).sum())
    if not walks:
        return None
    start, end = event_union(trace, own & trace.name_mask(lambda name: name in _SEARCHED))
    spent = float((end - start).sum())
    if not window.on_device:
        return (spent + walks * (latency_us or 0.0) * 1e3) / walks
    lengths = [end - start for _, start, end in window.steps]
    if lengths and issue_time_ns(window) >= _HOST_BOUND * float(np.median(lengths)):
        # The host limits the step: any work there makes it longer.
        return spent / walks
    hidden = covered(window.compute, start + window.shifted_ns, end + window.shifted_ns)
    return (spent - float(hidden.sum())) / walks


def searches_unused(windows: Sequence[Window]) -> bool | None:
    """Return whether DDP searches unused parameters in the windows; None if they show no forward pass of DDP."""
    traces = [window.trace for window in windows if len(window.forwards)]
    return any(bool(trace.name_mask(_is_search).any()) for trace in traces) if traces else None


def _is_search(name: str) -> bool:
    return name == SEARCH


_DDP_FORWARD = "DistributedDataParallel.forward"
"""The annotation around each forward call of a wrapped model (torch/nn/parallel/distributed.py)."""
_DATA_PARALLEL = re.compile(r"(?<![A-Za-z])DataParallel\.forward|nn\.Module: DataParallel_\d")
"""``torch.nn.DataParallel`` in the name of an annotation or of a Python frame, but not DistributedDataParallel or
FullyShardedDataParallel."""


def job_facts(logs: Sequence[RankLog], windows: Sequence[Window], ranks_seen: int) -> JobFacts:
    """Return the job facts, each from the first rank whose record has it, else from the traces. ``ranks_seen``: ranks in the primary
    recording."""
    if not logs:
        return _job_of_windows(windows)
    known = replace(_job_of_logs(logs), ranks_seen=ranks_seen)
    if not windows:
        return known
    seen = _job_of_windows(windows)
    unknown = [name for name in known.__struct_fields__ if getattr(known, name) is None]
    return replace(known, **{name: getattr(seen, name) for name in unknown})


def _job_of_logs(logs: Sequence[RankLog]) -> JobFacts:
    infos = [log.record.info for log in logs]
    device = first(infos, "device") or ("cuda" if any(log.device_times for log in logs) else None)
    without = False if any("rank" in info for info in infos) else None
    uses_nccl = "nccl" in str(first(infos, "backend"))
    known = {name: first(infos, name) for name in JobFacts.__struct_fields__} | {
        "ranks_seen": len(logs),
        "hosts": len({log.host for log in logs if log.host}) or None,
        "device": str(device).split(":")[0] if device else None,
        "is_ddp": True if any(log.has_ddp for log in logs) else without,
        "debugging_variables": _variables_set_to(infos, _DEBUGGING | (_DEBUGGING_NCCL if uses_nccl else {})),
        "disabled_paths": _variables_set_to(infos, _disabling_variables(logs) if uses_nccl else {}),
    }
    return JobFacts(**known)


_DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "HIP_LAUNCH_BLOCKING": "1",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
}
_DEBUGGING_NCCL = {"NCCL_DEBUG": "TRACE"}
_BETWEEN_HOSTS = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "SOCKET"}
_WITHIN_A_HOST = {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "LOC", "NCCL_SHM_DISABLE": "1"}


def _disabling_variables(logs: Sequence[RankLog]) -> dict[str, str]:
    """Values of variables that disable NCCL's fast paths between hosts or within a host, if the job has several hosts, or several ranks
    on a host."""
    ranks = Counter(log.host for log in logs)
    between = _BETWEEN_HOSTS if len(ranks) > 1 else {}
    return between | (_WITHIN_A_HOST if max(ranks.values()) > 1 else {})


def _variables_set_to(infos: Sequence[Mapping[str, Any]], values: Mapping[str, str]) -> list[str] | None:
    """The ``values`` that are set in any rank's recorded environment, as NAME=value; None if no environment was recorded."""
    recorded = [env for info in infos if isinstance(env := info.get("environment"), dict)]
    found = {
        f"{name}={env[name]}"
        for env in recorded
        for name, value in values.items()
        if isinstance(set_to := env.get(name), str) and set_to.strip().upper() == value
    }
    return sorted(found) if recorded else None


_COMPILED = ("CompiledFunction", "CompiledFxGraph", "Torch-Compiled Region", "## Call CompiledFxGraph")
"""Prefixes of the names of operators and annotations of compiled functions (AOTAutograd and Inductor)."""


def _job_of_windows(windows: Sequence[Window]) -> JobFacts:
    """Job facts from the traces' metadata and the names of their events."""
    metas = [window.trace.meta for window in windows]
    names = {name for window in windows for name in window.trace.names}
    devices = [device for meta in metas for device in meta.devices]
    return JobFacts(
        world_size=next((meta.world_size for meta in metas if meta.world_size is not None), None),
        ranks_seen=len(windows),
        hosts=len({meta.host for meta in metas if meta.host}) or None,
        backend=next((meta.backend for meta in metas if meta.backend), None),
        device="cuda" if any(window.on_device for window in windows) else "cpu",
        device_name=str(devices[0].get("name")) if devices else None,
        torch=next((meta.torch_version for meta in metas if meta.torch_version), None),
        nccl=next((meta.nccl_version for meta in metas if meta.nccl_version), None),
        is_ddp=any(_DDP_FORWARD in name for name in names) or None,
        data_parallel=any(_DATA_PARALLEL.search(name) for name in names) or None,
        compiled=any(name.startswith(_COMPILED) for name in names) or None,
    )
