"""Where the per-rank stage runs: processes of this machine, or a Dask or Ray cluster that the user has.

Whatever the engine, each file is read by :func:`.worker.attempt` alone, so results are the same. A cluster's workers need
ddpdoctor installed and see the files under the same absolute paths (or by URL).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.trace.columns import RankTrace, placed
from ddpdoctor.trace.sources import is_url

from .worker import Result, Task, Told

KINDS = ("dask", "ray")
LOOPBACK = "127.0.0.1"
"""Where a cluster of our own listens: whoever reaches it can run code as the user."""


Engine = Callable[[Sequence[Task]], Iterator[Result]]
"""Reads traces somewhere: gives (number, trace or None, reason why there is none) of each task as it is done. A worker that dies costs
the file it was reading. Ending the iteration early cancels the rest. Raises DdpDoctorError where it cannot be reached."""


def in_processes(workers: int, told: Told) -> Engine:
    """Processes of this machine; ``told`` how far each file is while it is read."""
    from .processes import load_in_processes

    return partial(load_in_processes, workers=workers, told=told)


def open_engine(spec: str, jobs: int | None = None) -> Engine:
    """The engine that ``spec`` names: ``dask``, ``ray``, ``dask://HOST:PORT`` or ``ray://HOST:PORT``.

    Without a place it is the cluster that the environment names, else one on this machine with ``jobs`` workers. Raises
    DdpDoctorError where it is none of these or its package is missing.
    """
    kind, separator, place = spec.partition("://")
    if kind not in KINDS or bool(separator) != bool(place):
        expected = ", ".join(f"{known} or {known}://HOST:PORT" for known in KINDS)
        raise DdpDoctorError(f"{spec!r} is not an engine: expected {expected}.")
    try:
        module = importlib.import_module(f"ddpdoctor.trace.engines.on_{kind}")
    except ImportError as error:
        raise DdpDoctorError(
            f"The engine {kind} needs its package ({error}): pip install 'ddpdoctor[{kind}]'."
        ) from error
    engine: Engine = module.Cluster(place, jobs).results
    return engine


def tell_of_own_cluster(kind: str, where: str, guarded: bool = False) -> None:
    """Say, on the way of warnings (stderr unless logging is configured), that a cluster was started for this reading."""
    if guarded:
        whom = "which asks for its token"
    else:
        whom = (
            "which asks nobody for a password: while the traces are read, every user who can reach that address can run "
            "code as you"
        )
    import logging

    logging.getLogger(__name__).warning(
        "ddpdoctor: a %s cluster was started on this machine at %s, %s.", kind, where, whom
    )


def absolute(task: Task) -> tuple[str, int | None, bool]:
    """Arguments of :func:`.worker.attempt` for a worker with another working directory."""
    file = task.file if is_url(task.file) else str(Path(task.file).absolute())
    return file, task.rank, task.cache


def outcome(task: Task, fetch: Callable[[], tuple[RankTrace | None, str]]) -> Result:
    """What ``fetch`` brings from a worker, under the name that the file has here; a worker's end as a sentence."""
    try:
        trace, reason = fetch()
    except Exception as error:  # each engine has its own: a worker that died, a lost node, a missing package
        said = str(error).strip().splitlines()
        what = ": ".join([type(error).__name__, *said[:1]])
        return task.number, None, f"{task.file}: the worker that read it failed ({what})."
    if trace is None:
        return task.number, None, reason.replace(absolute(task)[0], task.file)
    return task.number, replace(trace, meta=placed(trace.meta, task.file, task.rank)), ""
