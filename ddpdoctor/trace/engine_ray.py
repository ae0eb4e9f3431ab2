"""The per-rank stage on a Ray cluster."""

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
from ddpdoctor.trace.engines import absolute, outcome
from ddpdoctor.trace.worker import Job, Result, attempt


class Cluster:
    """A Ray cluster: that at ``place`` (HOST:PORT of its client server), else that of $RAY_ADDRESS or the one that
    runs on this machine, else a new one on this machine with ``workers`` processors (default: all)."""

    def __init__(self, place: str, workers: int | None) -> None:
        self._address = f"ray://{place}" if place else None
        self._workers = workers

    def results(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """See :class:`ddpdoctor.trace.engines.Engine`."""
        with self._connected():
            # A worker that dies of memory would die of the same file again.
            read = ray.remote(attempt).options(max_retries=0)
            # One file a processor, none queued for it: a worker that dies takes its queue along.
            processors = max(1, int(ray.cluster_resources().get("CPU", 1)))
            left = iter(jobs)
            under_way = {read.remote(*absolute(job)): job for job in islice(left, processors)}
            while under_way:
                (done, *_), _ = ray.wait(list(under_way))
                yield outcome(under_way.pop(done), partial(ray.get, done))
                if following := next(left, None):
                    under_way[read.remote(*absolute(following))] = following

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
                    ray.init("local", num_cpus=self._workers, include_dashboard=False, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = self._address or os.environ.get("RAY_ADDRESS") or "this machine"
            raise DdpDoctorError(
                f"There is no Ray cluster at {where}: {str(error).splitlines()[0]}"
            ) from error
        try:
            yield
        finally:
            ray.shutdown()
