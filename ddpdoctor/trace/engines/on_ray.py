"""Reads traces on a Ray cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import ray  # type: ignore[import-not-found]

from ddpdoctor.errors import DdpDoctorError

from .choice import LOOPBACK, absolute, to_result, warn_of_local_cluster
from .worker import Result, Task, read_one


class Cluster:
    """The Ray cluster at ``place`` (HOST:PORT of its client server), else that of $RAY_ADDRESS, else one on this machine.

    On this machine, the one that runs already, else a new one with ``workers`` processors (default: all).
    """

    def __init__(self, place: str, workers: int | None) -> None:
        self._address = f"ray://{place}" if place else None
        self._workers = workers

    def results(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """See :data:`.choice.Engine`."""
        with self._connected():
            # No retries: a file that exhausts the memory of one worker would kill the next ones too.
            read = ray.remote(read_one).options(max_retries=0)
            # One file per processor and none queued: if a worker dies, its queue fails with it.
            processors = max(1, int(ray.cluster_resources().get("CPU", 1)))
            pending = iter(tasks)
            running = {read.remote(*absolute(task)): task for task in islice(pending, processors)}
            while running:
                (done, *_), _ = ray.wait(list(running))
                yield to_result(running.pop(done), partial(ray.get, done))
                if following := next(pending, None):
                    running[read.remote(*absolute(following))] = following

    @contextmanager
    def _connected(self) -> Iterator[None]:
        if ray.is_initialized():
            yield
            return
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        try:
            if self._address is not None:
                ray.init(self._address, **quiet)
            else:
                try:
                    ray.init(os.environ.get("RAY_ADDRESS", "auto"), **quiet)
                except ConnectionError:
                    if "RAY_ADDRESS" in os.environ:
                        raise
                    _start_here(self._workers, quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = self._address or os.environ.get("RAY_ADDRESS") or "this machine"
            raise DdpDoctorError(
                f"There is no Ray cluster at {where}: {str(error).splitlines()[0]}"
            ) from error
        try:
            yield
        finally:
            ray.shutdown()


def _start_here(workers: int | None, quiet: dict[str, Any]) -> None:
    """Starts a cluster that listens on the loopback interface only.

    Ray offers this for desktops, by an environment variable and a constant that it reads at import. Otherwise its servers
    listen on all interfaces on Linux.
    """
    from ray._private import ray_constants  # type: ignore[import-not-found]

    variable = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before, clusters = os.environ.get(variable), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[variable], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        ray.init("local", num_cpus=workers, include_dashboard=False, _node_ip_address=LOOPBACK, **quiet)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before
    # From 2.59 on, Ray requires the user's token by default.
    guarded = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    warn_of_local_cluster("Ray", ray.util.get_node_ip_address(), guarded)
