"""Telemetry of this host while the job runs, and metrics of the run for Prometheus: each by one launcher of a host at a time.

Metrics have a process of their own: whoever connects to it, and however, the process that copies the recording lacks nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.launch.beside import Beside, is_told_to_end, say
from ddpdoctor.launch.leftovers import HostRanks
from ddpdoctor.launch.options import RunOptions
from ddpdoctor.rundir import Carrier, Note, host_directory
from ddpdoctor.rundir.carrier import METRICS

if TYPE_CHECKING:
    from ddpdoctor.telemetry import TelemetrySampler

_STOP_S = 2.0
_METRICS_START_S, _METRICS_STOP_S = 10.0, 1.0
_LOOK_S = 1.0
"""Between two looks at whether another launcher still serves metrics."""


class HostWatch:
    """Starts and ends the host's telemetry sampler and what serves its metrics."""

    def __init__(self, run: Path, root: Path, host: str, ranks: HostRanks, options: RunOptions) -> None:
        """``root`` is where the ranks' spools lie on this host."""
        self._run, self._root = run, root
        self._directory = Path(host_directory(str(run), host))
        self._host, self._ranks, self._options = host, ranks, options
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

    def await_metrics(self, warn: Callable[[str], None]) -> None:
        """Wait for what the metrics have to say."""
        said = {} if self._metrics is None else self._metrics.answer(_METRICS_START_S)
        if said.get("warn"):
            warn(said["warn"])

    def sample(self) -> None:
        """Begin sampling, in a thread, if that is asked for. For when the job runs: what telemetry imports must not delay it."""
        if not self._options.telemetry:
            return
        from ddpdoctor.telemetry import TelemetrySampler

        self._sampler = TelemetrySampler(
            self._directory,
            interval_s=self._options.telemetry_interval_s,
            rank_pids=self._ranks.pid_by_rank,
            host=self._host,
        )
        self._sampler.start()

    def _serve(self, orders: int, writer: int) -> None:
        office = Carrier(str(self._root), METRICS)
        if not office.take():
            say(writer)
            while not office.take():
                if is_told_to_end(orders, _LOOK_S):
                    return
        from ddpdoctor.telemetry import serve_metrics

        if self._options.prometheus is not None:
            serve_metrics(
                self._run, self._host, self._options.prometheus, orders, lambda text: say(writer, warn=text)
            )
        office.release()

    def stop(self) -> list[Note]:
        """End serving and sampling; returns what went wrong."""
        if self._metrics is not None:
            self._metrics.stop(_METRICS_STOP_S)
        if self._sampler is not None:
            self._sampler.stop(timeout_s=_STOP_S)
        return [] if self._sampler is None else list(self._sampler.notes)
