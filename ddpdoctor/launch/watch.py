"""Telemetry of this host while the job runs, by one launcher a host, and metrics of the run for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.launch.leftovers import HostRanks
from ddpdoctor.launch.options import RunOptions
from ddpdoctor.rundir import Note, host_directory

if TYPE_CHECKING:
    from ddpdoctor.telemetry import Exporter, HostLock, TelemetrySampler

_STOP_S = 2.0


class HostWatch:
    """Starts and ends the host's telemetry sampler; another launcher of this host may have it already."""

    def __init__(self, run: Path, host: str, ranks: HostRanks, options: RunOptions) -> None:
        self._run = run
        self._directory = Path(host_directory(str(run), host))
        self._host, self._ranks, self._options = host, ranks, options
        self._lock: HostLock | None = None
        self._sampler: TelemetrySampler | None = None
        self._exporter: Exporter | None = None

    def start(self, warn: Callable[[str], None]) -> None:
        """Begin sampling and serving metrics, in threads, unless another launcher of this host does.

        For when the job runs: what telemetry imports must not delay it.
        """
        if not self._options.telemetry and self._options.prometheus is None:
            return
        from ddpdoctor.telemetry import TelemetrySampler, acquire_host_lock

        self._lock = acquire_host_lock(self._directory)
        if self._lock is None:
            return
        if self._options.prometheus is not None:
            from ddpdoctor.telemetry import start_exporter

            self._exporter = start_exporter(self._run, self._host, self._options.prometheus, warn)
        if self._options.telemetry:
            self._sampler = TelemetrySampler(
                self._directory,
                interval_s=self._options.telemetry_interval_s,
                rank_pids=self._ranks.pid_by_rank,
                host=self._host,
            )
            self._sampler.start()

    def stop(self) -> list[Note]:
        """End serving and sampling; returns what went wrong."""
        if self._exporter is not None:
            self._exporter.close()
        if self._sampler is not None:
            self._sampler.stop(timeout_s=_STOP_S)
        if self._lock is not None:
            self._lock.release()
        return [] if self._sampler is None else list(self._sampler.notes)
