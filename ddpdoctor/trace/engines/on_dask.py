"""Reads traces on a Dask cluster (``dask.distributed``)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

import dask  # type: ignore[import-not-found]
from dask.distributed import Client, LocalCluster, as_completed  # type: ignore[import-not-found]

from ddpdoctor.errors import DdpDoctorError

from .choice import LOOPBACK, absolute, to_result, warn_of_local_cluster
from .worker import Result, Task, read_one


class Cluster:
    """The Dask cluster at ``place`` (HOST:PORT), else that of Dask's settings ($DASK_SCHEDULER_ADDRESS), else a new one.

    A new one runs on this machine with ``workers`` processes (default: Dask's choice).
    """

    def __init__(self, place: str, workers: int | None) -> None:
        self._address = f"tcp://{place}" if place else dask.config.get("scheduler-address", None)
        self._workers = workers

    def results(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """See :data:`.choice.Engine`."""
        with ExitStack() as opened:
            client = self._client(opened)
            # One file per thread and none queued: if a worker dies, its queue fails with it.
            threads = max(1, sum(client.nthreads().values()))
            pending = iter(tasks)
            running: dict[Any, Task] = {}
            done = as_completed(loop=client.loop)
            for task in islice(pending, threads):
                done.add(_submit(client, task, running))
            for future in done:
                task = running.pop(future)
                yield to_result(task, future.result)
                future.release()
                if following := next(pending, None):
                    done.add(_submit(client, following, running))

    def _client(self, opened: ExitStack) -> Any:
        if self._address is not None:
            try:
                return opened.enter_context(Client(self._address, timeout="10s", set_as_default=False))
            except (OSError, ValueError) as error:
                raise DdpDoctorError(f"There is no Dask scheduler at {self._address}: {error}.") from error
        # No retries: a file that exhausts the memory of one worker would kill the next ones too.
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
        warn_of_local_cluster("Dask", cluster.scheduler_address.rpartition("/")[2])
        return opened.enter_context(Client(cluster, set_as_default=False))


def _submit(client: Any, task: Task, running: dict[Any, Task]) -> Any:
    future = client.submit(read_one, *absolute(task), pure=False)
    running[future] = task
    return future
