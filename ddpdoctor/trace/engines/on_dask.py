"""The per-rank stage on a Dask cluster (``dask.distributed``)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

import dask  # type: ignore[import-not-found]
from dask.distributed import Client, LocalCluster, as_completed  # type: ignore[import-not-found]

from ddpdoctor.errors import DdpDoctorError

from .choice import LOOPBACK, absolute, outcome, tell_of_own_cluster
from .worker import Result, Task, attempt


class Cluster:
    """A Dask cluster: that at ``place`` (HOST:PORT), else that of Dask's settings ($DASK_SCHEDULER_ADDRESS), else a new one.

    A new one is on this machine and has ``workers`` processes (default: Dask's choice).
    """

    def __init__(self, place: str, workers: int | None) -> None:
        self._address = f"tcp://{place}" if place else dask.config.get("scheduler-address", None)
        self._workers = workers

    def results(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """See :data:`.choice.Engine`."""
        with ExitStack() as opened:
            client = self._client(opened)
            # One file a thread, none queued there: a worker that dies takes its queue along.
            threads = max(1, sum(client.nthreads().values()))
            left = iter(tasks)
            under_way: dict[Any, Task] = {}
            done = as_completed(loop=client.loop)
            for task in islice(left, threads):
                done.add(_submitted(client, task, under_way))
            for future in done:
                task = under_way.pop(future)
                yield outcome(task, future.result)
                future.release()
                if following := next(left, None):
                    done.add(_submitted(client, following, under_way))

    def _client(self, opened: ExitStack) -> Any:
        if self._address is not None:
            try:
                return opened.enter_context(Client(self._address, timeout="10s", set_as_default=False))
            except (OSError, ValueError) as error:
                raise DdpDoctorError(f"There is no Dask scheduler at {self._address}: {error}.") from error
        # A worker that dies of memory would die of the same file again: do not give it to three others.
        settings = {"distributed.scheduler.allowed-failures": 0, "distributed.scheduler.http.routes": []}
        opened.enter_context(dask.config.set({**settings, "distributed.worker.http.routes": []}))
        cluster = LocalCluster(
            host=LOOPBACK,
            n_workers=self._workers,
            threads_per_worker=1,
            dashboard_address=f"{LOOPBACK}:0",
            scheduler_kwargs={"dashboard": False},
            worker_dashboard_address=None,
            silence_logs=logging.CRITICAL,
        )
        opened.enter_context(cluster)
        tell_of_own_cluster("Dask", cluster.scheduler_address.rpartition("/")[2])
        return opened.enter_context(Client(cluster, set_as_default=False))


def _submitted(client: Any, task: Task, under_way: dict[Any, Task]) -> Any:
    future = client.submit(attempt, *absolute(task), pure=False)
    under_way[future] = task
    return future
