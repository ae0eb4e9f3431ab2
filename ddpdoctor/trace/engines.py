"""Where the per-rank stage runs: processes of this machine, or a Dask or Ray cluster that the user has.

Whatever the engine, each file is read by :func:`ddpdoctor.trace.worker.attempt` alone, so results are the same. A
cluster's workers need ddpdoctor installed and see the files under the same absolute paths (or by URL).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.trace.archive import placed
from ddpdoctor.trace.columns import RankTrace
from ddpdoctor.trace.remote import is_url
from ddpdoctor.trace.worker import Job, Result, load_here

KINDS = ("dask", "ray")
LOOPBACK = "127.0.0.1"
_log = logging.getLogger(__name__)


class Engine(Protocol):
    """Reads traces somewhere."""

    def results(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """(number, trace or None, reason why there is none) of each job as it is done. A worker that dies costs
        the file it was reading. Ending the iteration early cancels the rest. Raises DdpDoctorError where the
        engine cannot be reached."""
        ...


class Processes:
    """Processes of this machine; where one would do, this one, unless the files are to be read ``apart``."""

    def __init__(self, workers: int, *, apart: bool = False) -> None:
        self._workers = workers
        self._apart = apart

    def results(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """See :class:`Engine`."""
        if self._workers < 2 and not self._apart:
            return load_here(jobs)
        from ddpdoctor.trace.parallel import load_in_processes

        return load_in_processes(jobs, self._workers)


def open_engine(spec: str, jobs: int | None = None) -> Engine:
    """The engine that ``spec`` names: ``dask`` or ``ray`` (the cluster that the environment names, else one on
    this machine with ``jobs`` workers), ``dask://HOST:PORT`` or ``ray://HOST:PORT``.

    Raises DdpDoctorError where it is none of these or its package is missing.
    """
    kind, separator, place = spec.partition("://")
    if kind not in KINDS or bool(separator) != bool(place):
        expected = ", ".join(f"{known} or {known}://HOST:PORT" for known in KINDS)
        raise DdpDoctorError(f"{spec!r} is no engine: expected {expected}.")
    try:
        module = importlib.import_module(f"ddpdoctor.trace.engine_{kind}")
    except ImportError as error:
        raise DdpDoctorError(
            f"The engine {kind} needs its package ({error}): pip install 'ddpdoctor[{kind}]'."
        ) from error
    engine: Engine = module.Cluster(place, jobs)
    return engine


def tell_of_own_cluster(kind: str, where: str, guarded: bool = False) -> None:
    """Say, on the way of warnings (stderr unless logging is configured), that a cluster was started for this reading."""
    whom = (
        "which asks for its token"
        if guarded
        else (
            "which asks nobody for a password: while the traces are read, every user who can reach that address can run code "
            "as you"
        )
    )
    _log.warning("ddpdoctor: a %s cluster was started on this machine at %s, %s.", kind, where, whom)


def absolute(job: Job) -> tuple[str, int | None, bool]:
    """Arguments of :func:`ddpdoctor.trace.worker.attempt` for a worker with another working directory."""
    _, file, rank, cache = job
    return file if is_url(file) else str(Path(file).absolute()), rank, cache


def outcome(job: Job, fetch: Callable[[], tuple[RankTrace | None, str]]) -> Result:
    """What ``fetch`` brings from a worker, under the name that the file has here; a worker's end as a
    sentence."""
    number, file, rank, _ = job
    try:
        trace, reason = fetch()
    except (
        Exception
    ) as error:  # each engine has its own for a worker that died, a lost node, a missing package
        said = str(error).strip().splitlines()
        what = ": ".join([type(error).__name__, *said[:1]])
        return number, None, f"{file}: the worker that read it failed ({what})."
    if trace is None:
        return number, None, reason.replace(absolute(job)[0], file)
    return number, replace(trace, meta=placed(trace.meta, file, rank)), ""
