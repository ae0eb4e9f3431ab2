"""The running job as metrics for Prometheus: text exposition format 0.0.4, served by the launcher.

Format and naming: https://prometheus.io/docs/instrumenting/exposition_formats/ and
https://prometheus.io/docs/practices/naming/ (base units, counters end in ``_total``). What was not measured has
no line, never a zero.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ddpdoctor.plain import plain_lines

from .live import RECENT_STEPS, Lateness, LiveRank, LiveRun, age_s, data_wait_ms, step_ms

LOOPBACK = "127.0.0.1"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CLOSE_S = 1.0

RANK_METRICS: Mapping[str, tuple[str, str]] = {
    "ddpdoctor_steps_total": ("counter", "Optimizer steps that the rank has completed."),
    "ddpdoctor_since_last_step_seconds": (
        "gauge",
        "Seconds since the rank finished its newest step: it grows while the job hangs.",
    ),
    "ddpdoctor_step_seconds": ("gauge", "Median step time of the rank over its newest steps."),
    "ddpdoctor_late_seconds": (
        "gauge",
        "How much later than the median of the others it reaches the gradient reduction.",
    ),
    "ddpdoctor_late_age_seconds": (
        "gauge",
        "Seconds since the end of the newest step that late_seconds covers.",
    ),
    "ddpdoctor_data_wait_seconds": ("gauge", "Median time per step in which the rank waits for data."),
    "ddpdoctor_recorded_age_seconds": (
        "gauge",
        "Seconds since the end of the newest step that the rank recorded in full: data waits and samples are from those.",
    ),
    "ddpdoctor_rank_cpu_cores": ("gauge", "CPU cores in use by the rank and its children."),
    "ddpdoctor_rank_memory_bytes": ("gauge", "Resident memory of the rank and its children."),
}
HOST_METRICS: Mapping[str, tuple[str, str]] = {
    "ddpdoctor_samples_per_second": ("gauge", "Samples that all ranks of the job train on per second."),
    "ddpdoctor_host_cpu_ratio": ("gauge", "CPU time of the host in use, 0 to 1."),
    "ddpdoctor_host_io_wait_ratio": ("gauge", "CPU time in which the host waits for disks, 0 to 1."),
    "ddpdoctor_host_memory_used_bytes": ("gauge", "Memory of the host in use."),
}
GPU_METRICS: Mapping[str, tuple[str, str]] = {
    "ddpdoctor_gpu_utilization_ratio": ("gauge", "Time in which the GPU ran any kernel, 0 to 1 (NVML)."),
    "ddpdoctor_gpu_memory_used_bytes": ("gauge", "GPU memory in use (NVML)."),
    "ddpdoctor_gpu_power_watts": ("gauge", "Power that the GPU draws (NVML)."),
    "ddpdoctor_gpu_temperature_celsius": ("gauge", "Temperature of the GPU (NVML)."),
}
METRICS = {**RANK_METRICS, **HOST_METRICS, **GPU_METRICS}
"""Every metric by name: (type, help). Those of ranks carry ``host`` and ``rank``, those of GPUs ``host`` and
``gpu`` (NVML's index), the others ``host``."""

Sample = tuple[str, dict[str, str], float | None]


def exposition(run: LiveRun, host: str) -> str:
    """The metrics of one host's part of ``run``, as far as it has been read."""
    rows: dict[str, list[str]] = {name: [] for name in METRICS}
    for name, labels, value in _samples(run, host):
        if value is not None:
            inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            rows[name].append(f"{name}{{{inside}}} {float(value)!r}")
    lines = []
    for name, (kind, meaning) in METRICS.items():
        if rows[name]:
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
    yield "ddpdoctor_samples_per_second", where, run.samples_per_s(RECENT_STEPS)
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
    late_ms = late.of_ranks_ms.get(live.rank)
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


class _Server(ThreadingHTTPServer):
    """The standard library's server without a look at DNS, and with nothing to say on stderr."""

    daemon_threads = True
    timeout = 0.5
    """Seconds that handle_request() waits for a scrape."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks for the host's full name, which may take seconds where DNS is slow.
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that hangs up is its own affair."""


class Exporter:
    """Serves ``/metrics`` from daemon threads. Each scrape reads what the ranks have recorded since the last."""

    def __init__(self, run: Path, host: str, address: tuple[str, int]) -> None:
        """Raises OSError or OverflowError where the address cannot be served on."""
        self._run, self._host, self._lock = LiveRun(run), host, threading.Lock()
        self._server = _Server(address, _handler(self.page))
        self.port: int = self._server.server_address[1]
        """The port, also where 0 asked for any."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ddpdoctor-metrics", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        # Not serve_forever(): its shutdown() waits without limit.
        while not self._ending.is_set():
            self._server.handle_request()
        self._server.server_close()

    def page(self) -> str:
        """The metrics as of now."""
        with self._lock:
            self._run.look()
            return exposition(self._run, self._host)

    def close(self) -> None:
        """End serving, within ``_CLOSE_S``; what is under way then goes with the process."""
        self._ending.set()
        self._thread.join(_CLOSE_S)


def _handler(page: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in ("/metrics", "/"):
                self.send_error(404, "metrics are at /metrics")
                return
            body = page().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: stderr is the job's."""

    return Handler


def start_exporter(
    run: Path, host: str, address: tuple[str, int] | None, warn: Callable[[str], None]
) -> Exporter | None:
    """Serve the run's metrics at ``address`` (host, port); None where that is None or cannot be had, which is
    said through ``warn``: the job goes on without.
    """
    if address is None:
        return None
    try:
        return Exporter(run, host, address)
    except Exception as error:
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        warn(f"--prometheus: no metrics, because {shown}:{address[1]} cannot be served on: {error}.")
        return None
