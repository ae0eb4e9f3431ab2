"""Telemetry of this host while the job runs, by one launcher a host."""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.launch.leftovers import HostRanks
from ddpdoctor.launch.options import RunOptions
from ddpdoctor.rundir import host_directory
from ddpdoctor.telemetry import TelemetrySampler, acquire_host_lock

_STOP_S = 2.0


class HostWatch:
    """Starts and ends the host's telemetry sampler; another launcher of this host may have it already."""

    def __init__(self, run: Path, host: str, ranks: HostRanks, options: RunOptions) -> None:
        directory = Path(host_directory(str(run), host))
        self._lock = acquire_host_lock(directory) if options.telemetry else None
        self._sampler = TelemetrySampler(
            directory, interval_s=options.telemetry_interval_s, rank_pids=ranks.pid_by_rank, host=host
        )

    def start(self) -> None:
        """Begin sampling, in a thread."""
        if self._lock is not None:
            self._sampler.start()

    def stop(self) -> list[str]:
        """End sampling; returns what went wrong, one sentence each."""
        if self._lock is None:
            return []
        self._sampler.stop(timeout_s=_STOP_S)
        self._lock.release()
        self._lock = None
        return list(self._sampler.notes)
