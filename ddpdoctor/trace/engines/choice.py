"""The engines that read traces: processes of this machine, or the user's Dask or Ray cluster.

A cluster's workers need ddpdoctor installed and the files under the same absolute paths (or URLs).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.trace.columns import RankTrace, relocated
from ddpdoctor.trace.sources import is_url

from .worker import ProgressCallback, Result, Task

KINDS = ("dask", "ray")
LOOPBACK = "127.0.0.1"
"""Address on which a cluster started here listens: a process that can connect to it can run code as the user."""


Engine = Callable[[Sequence[Task]], Iterator[Result]]
"""Reads traces: yields (number, trace or None, reason why there is none) of each task as it finishes. If a worker dies, only the file that
it was reading fails. Ending the iteration early cancels the other tasks. Raises DdpDoctorError if the engine cannot be reached."""


def in_processes(workers: int, on_progress: ProgressCallback) -> Engine:
    """Worker processes of this machine; ``on_progress`` is called while a file is read."""
    from .processes import read_in_processes

    return partial(read_in_processes, workers=workers, on_progress=on_progress)


def open_engine(spec: str, jobs: int | None = None) -> Engine:
    """The engine for ``spec``: ``dask``, ``ray``, ``dask://HOST:PORT`` or ``ray://HOST:PORT``.

    Without an address, the cluster that the environment names, or else one on this machine with ``jobs`` workers. Raises
    DdpDoctorError if ``spec`` is invalid or its package is missing.
    """
    kind, separator, place = spec.partition("://")
    if kind not in KINDS or bool(separator) != bool(place):
        expected = ", ".join(f"{known} or {known}://HOST:PORT" for known in KINDS)
        raise DdpDoctorError(f"{spec!r} is not an engine: expected {expected}.")
    try:
        module = importlib.import_module(f"ddpdoctor.trace.engines.on_{kind}")
    except ImportError as error:
        raise DdpDoctorError(
            f"The engine {kind} needs its package ({error}): pip install '.[{kind}]' in a checkout of ddpdoctor."
        ) from error
    engine: Engine = module.Cluster(place, jobs).results
    return engine


def warn_of_local_cluster(kind: str, where: str, guarded: bool = False) -> None:
    """Log a warning (to stderr unless logging is configured) that a cluster was started here, and who can reach it."""
    if guarded:
        whom = "which asks for its token"
    else:
        whom = (
            "which needs no password: while the traces are read, every user who can reach that address can run "
            "code as you"
        )
    import logging

    logging.getLogger(__name__).warning(
        "ddpdoctor: a %s cluster was started on this machine at %s, %s.", kind, where, whom
    )


def absolute(task: Task) -> tuple[str, int | None, bool]:
    """Arguments of :func:`.worker.read_one`, with an absolute path for a worker in another working directory."""
    file = task.file if is_url(task.file) else str(Path(task.file).absolute())
    return file, task.rank, task.cache


def to_result(task: Task, fetch: Callable[[], tuple[RankTrace | None, str]]) -> Result:
    """Result of ``fetch``, with the file's name as given in ``task``; an exception becomes the reason, as a sentence."""
    try:
        trace, reason = fetch()
    except Exception as error:  # each engine has its own: a worker that died, a lost node, a missing package
        lines = str(error).strip().splitlines()
        what = ": ".join([type(error).__name__, *lines[:1]])
        return task.number, None, f"{task.file}: the worker that read it failed ({what})."
    if trace is None:
        return task.number, None, reason.replace(absolute(task)[0], task.file)
    return task.number, replace(trace, meta=relocated(trace.meta, task.file, task.rank)), ""
