"""Cores of the busiest host: what the job uses of them, what stands idle, and what that leaves for work done beside a step.

Work that is moved, and not removed (a loader's workers, transfers beside the backward pass), still takes its time on a CPU. A job
that uses J cores in steps of length T does ``J x T`` of work in each. Given all cores that it has or that stand idle, J + I, it
cannot be quicker than

    T x J / (J + I)

And what is to run beside a computation needs a core that the computation leaves free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.telemetry import HostTelemetry

from .columns import during, mean, steps_span


class Cores(msgspec.Struct, frozen=True):
    """Of one host, means while the steps ran."""

    job: float
    """Used by the job's ranks and their workers."""
    idle: float
    ranks: int
    computing: float | None
    """Threads with which its ranks compute, all together; None where unknown."""
    host: str = ""

    def least_step(self, step: float) -> float:
        """What a step of this length takes at least where no work is removed from it."""
        return step * self.job / (self.job + self.idle)

    @property
    def hidden_share(self) -> float:
        """Part (0 to 1) of a transfer by threads of the host for which the computation beside it leaves a core; 1 where the
        number of threads is unknown."""
        if self.computing is None:
            return 1.0
        return float(np.clip((self.job + self.idle - self.computing) / self.ranks, 0.0, 1.0))


def host_cores(hosts: Mapping[str, HostTelemetry], logs: Sequence[RankLog]) -> Cores | None:
    """The host with the smallest part of its cores to spare; None where telemetry tells of none while the steps ran."""
    here: dict[str, list[RankLog]] = {}
    for log in logs:
        here.setdefault(log.host, []).append(log)
    found = [_of_host(hosts[name], own) for name, own in here.items() if name in hosts]
    known = [cores for cores in found if cores is not None]
    return max(known, key=lambda cores: cores.least_step(1.0), default=None)


def _of_host(host: HostTelemetry, logs: Sequence[RankLog]) -> Cores | None:
    stated = host.header.get("host_facts") or {}
    usable = stated.get("cpu_count_usable") or stated.get("cpu_count_logical")
    span = steps_span(logs)
    if not usable or span is None:
        return None
    percent = mean(during(host.host_column("cpu_percent"), span))
    if percent is None:
        return None
    of_ranks = [mean(during(host.rank_column(log.rank, "cpu_percent"), span)) for log in logs]
    known = [each / 100 for each in of_ranks if each is not None]
    busy = float(usable) * percent / 100
    job = sum(known) if len(known) == len(logs) else busy
    stated_threads = [(log.record.info.get("threads") or {}).get("torch") for log in logs]
    threads = [float(count) for count in stated_threads if count]
    return Cores(
        job=max(job, 1e-3),
        idle=max(0.0, float(usable) - busy),
        ranks=len(logs),
        computing=sum(threads) if len(threads) == len(logs) else None,
        host=logs[0].host,
    )
