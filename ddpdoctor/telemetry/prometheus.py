"""Metrics of a running job for Prometheus (text exposition format 0.0.4), served by a helper process. They include a breakdown of the wall
time so far; ``measure/wholerun`` has a more detailed one for recorded runs.

Format and naming: https://prometheus.io/docs/instrumenting/exposition_formats/ and
https://prometheus.io/docs/practices/naming/ (base units, counters end in ``_total``). Values that were not measured have
no line, never a zero.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpdoctor.plain import plain_lines

from .live import RECENT_STEPS, Lateness, LiveRank, LiveRun, age_s, data_wait_ms, step_ms
from .scrapes import Scrapes

PARTS = ("start", "earlier_attempts", "preparation", "steps", "other", "end")
"""Parts of the wall time, in order. ``preparation``: from the process group to the end of step 0, minus a usual step. ``steps``: number of
steps times the usual step time. ``other``: the rest, in longer steps (pauses, evaluations, checkpoints) and in the present step. The other
parts are those of a recorded run."""


@dataclass(frozen=True)
class RunSoFar:
    """Wall time since the start of the launcher, and its parts."""

    wall_s: float
    parts_s: dict[str, float]
    """Seconds by part, mean over the ranks, without empty parts."""

    @property
    def goodput(self) -> float:
        """Share of the wall time that all steps so far would take if each took the usual time, 0 to 1."""
        return min(self.parts_s.get("steps", 0.0) / self.wall_s, 1.0)


def run_so_far(run: LiveRun, host: str | None = None) -> RunSoFar | None:
    """Wall time of ``run`` until now or until its end, from the ranks of ``host`` if given. None without a start or ranks."""
    started_ns = run.manifest.get("started_ns")
    ranks = [live for live in run.ranks.values() if host in (None, live.host)]
    if started_ns is None or not ranks:
        return None
    last_ns = max((live.steps[-1].end_ns for live in ranks if live.steps), default=started_ns)
    until_ns = run.manifest.get("ended_ns") or (last_ns if run.gone else time.time_ns())
    wall_s = (until_ns - started_ns) / 1e9
    if wall_s <= 0:
        return None
    each = [_parts(live, started_ns, until_ns, is_over=run.over) for live in ranks]
    parts_s = {part: sum(parts[part] for parts in each) / len(each) for part in PARTS}
    return RunSoFar(wall_s, {part: value for part, value in parts_s.items() if value > 0})


def _parts(live: LiveRank, started_ns: int, until_ns: int, *, is_over: bool) -> dict[str, float]:
    """Seconds by part of one rank; the sum is the time from start to end."""
    parts, left_s = dict.fromkeys(PARTS, 0.0), (until_ns - started_ns) / 1e9

    def take(part: str, value_s: float) -> None:
        nonlocal left_s
        parts[part] = min(max(value_s, 0.0), left_s)
        left_s -= parts[part]

    if live.joined_ns is not None:
        take("earlier_attempts" if live.restarts else "start", (live.joined_ns - started_ns) / 1e9)
    if not live.steps:
        take("preparation", left_s)
    if live.steps and (live.ended or is_over):
        take("end", (until_ns - live.steps[-1].end_ns) / 1e9)
    usual_s = (live.median_step_ms() or 0.0) / 1e3
    if live.first_ms is not None:
        take("preparation", live.first_ms / 1e3 - usual_s)
    take("steps", live.steps_total * usual_s)
    take("other", left_s)
    return parts


_PAGE_S = 0.5

RANK_METRICS: Mapping[str, str] = {
    "ddpdoctor_steps_total": "Optimizer steps that the rank has completed.",
    "ddpdoctor_since_last_step_seconds": "Seconds since the rank finished its newest step: it grows while the job hangs.",
    "ddpdoctor_step_seconds": "Median step time of the rank over its newest steps.",
    "ddpdoctor_late_seconds": "How much later than the median of the others it reaches the gradient reduction.",
    "ddpdoctor_late_age_seconds": "Seconds since the end of the newest step that late_seconds covers.",
    "ddpdoctor_data_wait_seconds": "Median time per step in which the rank waits for data.",
    "ddpdoctor_recorded_age_seconds": (
        "Seconds since the end of the newest step that the rank recorded in full: data waits and samples are from those."
    ),
    "ddpdoctor_rank_cpu_cores": "CPU cores in use by the rank and its children.",
    "ddpdoctor_rank_memory_bytes": "Resident memory of the rank and its children.",
}
HOST_METRICS: Mapping[str, str] = {
    "ddpdoctor_samples_per_second": "Samples that the ranks of the host train on per second.",
    "ddpdoctor_host_cpu_ratio": "CPU time of the host in use, 0 to 1.",
    "ddpdoctor_host_io_wait_ratio": "CPU time in which the host waits for disks, 0 to 1.",
    "ddpdoctor_host_memory_used_bytes": "Memory of the host in use.",
}
RUN_METRICS: Mapping[str, str] = {
    "ddpdoctor_goodput_ratio": (
        "Share of the wall time so far that the steps so far would take if each took the usual time, 0 to 1."
    ),
    "ddpdoctor_run_seconds": "Wall time since the launcher's start by part, mean over the ranks of the host.",
}
GPU_METRICS: Mapping[str, str] = {
    "ddpdoctor_gpu_utilization_ratio": "Time in which the GPU ran any kernel, 0 to 1 (NVML).",
    "ddpdoctor_gpu_memory_used_bytes": "GPU memory in use (NVML).",
    "ddpdoctor_gpu_power_watts": "Power that the GPU draws (NVML).",
    "ddpdoctor_gpu_temperature_celsius": "Temperature of the GPU (NVML).",
}
METRICS = {**RANK_METRICS, **RUN_METRICS, **HOST_METRICS, **GPU_METRICS}
"""Help text by metric. Names that end in ``_total`` are counters, the others gauges. Labels: ``host`` and ``rank`` for ranks, ``host``
and ``gpu`` (NVML's index) for GPUs, ``host`` and ``part`` for the parts of the run, ``host`` for the others."""

Sample = tuple[str, dict[str, str], float | None]


def exposition(run: LiveRun, host: str) -> str:
    """Metrics page of one host of ``run``, from the data read so far."""
    return page_of(METRICS, _samples(run, host))


def page_of(metrics: Mapping[str, str], samples: Iterable[Sample]) -> str:
    """Page with the ``samples`` whose value is not None. ``metrics``: help text by name."""
    rows: dict[str, list[str]] = {name: [] for name in metrics}
    for name, labels, value in samples:
        if value is not None:
            inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            rows[name].append(f"{name}{{{inside}}} {float(value)!r}")
    lines = []
    for name, meaning in metrics.items():
        if rows[name]:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", *rows[name]]
    return "\n".join(lines) + "\n"


def _samples(run: LiveRun, host: str) -> Iterator[Sample]:
    sample = run.samples.get(host, {})
    late = run.lateness
    processes = sample.get("ranks") or {}
    for live in run.ranks.values():
        if live.host == host:
            used = processes.get(str(live.rank)) or {}
            yield from _rank_samples(live, late, used)
    where, machine = {"host": host}, sample.get("host") or {}
    so_far = run_so_far(run, host)
    if so_far is not None:
        yield "ddpdoctor_goodput_ratio", where, so_far.goodput
        for part, seconds in so_far.parts_s.items():
            yield "ddpdoctor_run_seconds", {**where, "part": part}, seconds
    yield "ddpdoctor_samples_per_second", where, run.samples_per_s(RECENT_STEPS, host)
    yield "ddpdoctor_host_cpu_ratio", where, _scaled(machine.get("cpu_percent"), 0.01)
    yield "ddpdoctor_host_io_wait_ratio", where, _scaled(machine.get("iowait_percent"), 0.01)
    yield "ddpdoctor_host_memory_used_bytes", where, machine.get("memory_used_bytes")
    for gpu in sample.get("gpus") or []:
        labels = {**where, "gpu": str(gpu.get("index"))}
        yield "ddpdoctor_gpu_utilization_ratio", labels, _scaled(gpu.get("gpu_utilization_percent"), 0.01)
        yield "ddpdoctor_gpu_memory_used_bytes", labels, gpu.get("memory_used_bytes")
        yield "ddpdoctor_gpu_power_watts", labels, gpu.get("power_watts")
        yield "ddpdoctor_gpu_temperature_celsius", labels, gpu.get("temperature_celsius")


def _rank_samples(live: LiveRank, late: Lateness, used: Mapping[str, Any]) -> Iterator[Sample]:
    late_ms = late.by_rank_ms.get(live.rank)
    labels = {"host": live.host, "rank": str(live.rank)}
    yield "ddpdoctor_steps_total", labels, live.steps_total
    yield "ddpdoctor_since_last_step_seconds", labels, live.since_last_step_s()
    yield "ddpdoctor_step_seconds", labels, _scaled(step_ms(live, RECENT_STEPS), 1e-3)
    yield "ddpdoctor_late_seconds", labels, _scaled(late_ms, 1e-3)
    yield "ddpdoctor_late_age_seconds", labels, None if late_ms is None else age_s(late.newest_ns)
    yield "ddpdoctor_data_wait_seconds", labels, _scaled(data_wait_ms(live, RECENT_STEPS), 1e-3)
    yield "ddpdoctor_recorded_age_seconds", labels, live.full_age_s()
    yield "ddpdoctor_rank_cpu_cores", labels, _scaled(used.get("cpu_percent"), 0.01)
    yield "ddpdoctor_rank_memory_bytes", labels, used.get("rss_bytes")


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _escaped(text: str) -> str:
    return plain_lines(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def metrics_server(address: tuple[str, int], page: Callable[[], str]) -> Scrapes:
    """Server of ``page``. Raises OSError or OverflowError if it cannot listen on the address (host, port)."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return Scrapes(socket.create_server(address, family=family), page, address[0])


class Exporter:
    """Serves :data:`.scrapes.PATH`. Each scrape reads what the ranks have recorded since the previous one."""

    def __init__(self, run: Path, host: str, address: tuple[str, int]) -> None:
        """Raises OSError or OverflowError if it cannot listen on the address (host, port)."""
        self._run, self._host = LiveRun(run), host
        self._scrapes = metrics_server(address, self.page)
        self.port = self._scrapes.port
        """The listening port, also if 0 was given."""
        self._text, self._until_s = "", 0.0

    def serve(self, ended: int) -> None:
        """Answer requests until the descriptor ``ended`` is readable or its other end is closed."""
        self._scrapes.serve(ended)

    def page(self) -> str:
        """The metrics page, at most ``_PAGE_S`` old. Files are not read more often than that."""
        if time.monotonic() >= self._until_s:
            self._run.update()
            self._text, self._until_s = exposition(self._run, self._host), time.monotonic() + _PAGE_S
        return self._text


def serve_metrics(
    run: Path, host: str, address: tuple[str, int], ended: int, say: Callable[[str], None]
) -> None:
    """Serve the metrics of ``host`` in the run directory ``run`` until ``ended`` is readable. Calls ``say`` once: with an error message, or
    with "" when the server listens.
    """
    try:
        exporter = Exporter(run, host, address)
    except Exception as error:
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        say(f"--prometheus: no metrics, because {shown}:{address[1]} cannot be served on: {error}.")
    else:
        say("")
        exporter.serve(ended)
