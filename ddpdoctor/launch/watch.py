"""Telemetry of this host while the job runs, by one launcher a host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.launch.leftovers import HostRanks
from ddpdoctor.launch.options import RunOptions
from ddpdoctor.rundir import host_directory

if TYPE_CHECKING:
    from ddpdoctor.telemetry import HostLock, TelemetrySampler

_STOP_S = 2.0


class HostWatch:
    """Starts and ends the host's telemetry sampler; another launcher of this host may have it already."""

    def __init__(self, run: Path, host: str, ranks: HostRanks, options: RunOptions) -> None:
        self._directory = Path(host_directory(str(run), host))
        self._host, self._ranks, self._options = host, ranks, options
        self._lock: HostLock | None = None
        self._sampler: TelemetrySampler | None = None

    def start(self) -> None:
        """Begin sampling, in a thread. For when the job runs: what telemetry imports must not delay it."""
        if not self._options.telemetry:
            return
        from ddpdoctor.telemetry import TelemetrySampler, acquire_host_lock

        self._lock = acquire_host_lock(self._directory)
        if self._lock is not None:
            self._sampler = TelemetrySampler(
                self._directory,
                interval_s=self._options.telemetry_interval_s,
                rank_pids=self._ranks.pid_by_rank,
                host=self._host,
            )
            self._sampler.start()

    def stop(self) -> list[str]:
        """End sampling; returns what went wrong, one sentence each."""
        if self._sampler is None or self._lock is None:
            return []
        self._sampler.stop(timeout_s=_STOP_S)
        self._lock.release()
        return list(self._sampler.notes)
