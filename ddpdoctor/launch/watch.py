"""Telemetry of this host while the job runs, by one launcher a host, and metrics of the run for Prometheus.

Metrics have a process of their own: whoever connects to it, and however, the process that copies the recording lacks nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.launch.beside import Beside, say
from ddpdoctor.launch.leftovers import HostRanks
from ddpdoctor.launch.options import RunOptions
from ddpdoctor.rundir import Note, host_directory

if TYPE_CHECKING:
    from ddpdoctor.telemetry import HostLock, TelemetrySampler

_STOP_S = 2.0
_METRICS_START_S, _METRICS_STOP_S = 10.0, 1.0


class HostWatch:
    """Starts and ends the host's telemetry sampler; another launcher of this host may have it already."""

    def __init__(self, run: Path, host: str, ranks: HostRanks, options: RunOptions) -> None:
        self._run = run
        self._directory = Path(host_directory(str(run), host))
        self._host, self._ranks, self._options = host, ranks, options
        self._lock: HostLock | None = None
        self._sampler: TelemetrySampler | None = None
        self._metrics: Beside | None = None

    def start_process(self, warn: Callable[[str], None]) -> None:
        """Start the process that serves metrics, if they are asked for. To be called before there is any thread: it is forked."""
        if self._options.prometheus is None:
            return
        self._metrics = Beside("metrics", self._serve)
        try:
            self._metrics.start()
        except OSError as error:
            self._metrics = None
            warn(f"--prometheus: no metrics, because no process can be started for them: {error.strerror}.")

    def start(self, warn: Callable[[str], None]) -> None:
        """Begin sampling, in a thread, unless another launcher of this host does; wait for what the metrics have to say.

        For when the job runs: what telemetry imports must not delay it.
        """
        if self._options.telemetry:
            self._start_sampling()
        said = {} if self._metrics is None else self._metrics.answer(_METRICS_START_S)
        if said.get("warn"):
            warn(said["warn"])

    def _start_sampling(self) -> None:
        from ddpdoctor.telemetry import TelemetrySampler, acquire_host_lock

        self._lock = acquire_host_lock(self._directory)
        if self._lock is None:
            return
        self._sampler = TelemetrySampler(
            self._directory,
            interval_s=self._options.telemetry_interval_s,
            rank_pids=self._ranks.pid_by_rank,
            host=self._host,
        )
        self._sampler.start()

    def _serve(self, orders: int, writer: int) -> None:
        from ddpdoctor.telemetry import serve_metrics

        if self._options.prometheus is not None:
            serve_metrics(
                self._run, self._host, self._options.prometheus, orders, lambda text: say(writer, warn=text)
            )

    def stop(self) -> list[Note]:
        """End serving and sampling; returns what went wrong."""
        if self._metrics is not None:
            self._metrics.stop(_METRICS_STOP_S)
        if self._sampler is not None:
            self._sampler.stop(timeout_s=_STOP_S)
        if self._lock is not None:
            self._lock.release()
        return [] if self._sampler is None else list(self._sampler.notes)
