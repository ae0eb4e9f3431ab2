"""Reads traces on the user's Dask or Ray cluster, or on one started on this machine. The packages are imported only if chosen.

A cluster's workers need ddpdoctor installed, and the files under the same absolute paths or URLs. They call the same function as
processes of this machine, :func:`.processes.read_one`, so results do not depend on the engine.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.trace.archive import relocated
from ddpdoctor.trace.processes import Engine, Result, Task, read_one
from ddpdoctor.trace.sources import is_url

_LOOPBACK = "127.0.0.1"
"""Address on which a cluster started here listens. A process that can connect to it can run code as the user."""


class _Cluster(NamedTuple):
    """A connection to a cluster."""

    slots: int
    """Number of files read at a time. Further files are not queued, because a worker that dies loses its queue."""
    submit: Callable[[str, int | None, bool], Any]
    """Starts :func:`read_one` with these arguments. Returns the running call."""
    wait_for_any: Callable[[list[Any]], Any]
    """Waits until one of these calls has ended, and returns it."""
    fetch: Callable[[Any], Any]
    """Returns the result of a call that has ended, or raises its error."""


def open_engine(spec: str, jobs: int | None = None) -> Engine:
    """The engine for ``spec``: ``dask``, ``ray``, ``dask://HOST:PORT`` or ``ray://HOST:PORT``.

    Without an address: the cluster named by the environment, else one on this machine with ``jobs`` workers. Raises DdpDoctorError if
    ``spec`` is invalid or its package is missing.
    """
    kind, separator, place = spec.partition("://")
    if kind not in KINDS or bool(separator) != bool(place):
        expected = ", ".join(f"{known} or {known}://HOST:PORT" for known in KINDS)
        raise DdpDoctorError(f"{spec!r} is not an engine: expected {expected}.")
    package, connect = KINDS[kind]
    try:
        for name in (kind, package):
            importlib.import_module(name)
    except ImportError as error:
        raise DdpDoctorError(
            f"The engine {kind} needs its package ({error}): pip install '.[{kind}]' in a checkout of ddpdoctor."
        ) from error
    return partial(_results, partial(connect, place, jobs))


def _results(
    connect: Callable[[], AbstractContextManager[_Cluster]], tasks: Sequence[Task]
) -> Iterator[Result]:
    """See :data:`.processes.Engine`."""
    with connect() as cluster:
        pending = iter(tasks)
        running = {cluster.submit(*_arguments(task)): task for task in islice(pending, cluster.slots)}
        while running:
            done = cluster.wait_for_any(list(running))
            yield _result(running.pop(done), partial(cluster.fetch, done))
            if following := next(pending, None):
                running[cluster.submit(*_arguments(following))] = following


def _arguments(task: Task) -> tuple[str, int | None, bool]:
    """Arguments of :func:`read_one`, with an absolute path because workers have other working directories."""
    file = task.file if is_url(task.file) else str(Path(task.file).absolute())
    return file, task.rank, task.cache


def _result(task: Task, fetch: Callable[[], Any]) -> Result:
    """Result of ``fetch``, with the file's name as given in ``task``. An exception is converted to a sentence with the reason."""
    try:
        trace, reason = fetch()
    except Exception as error:  # engine-specific: a worker that died, a lost node, a missing package
        lines = str(error).strip().splitlines()
        what = ": ".join([type(error).__name__, *lines[:1]])
        return task.number, None, f"{task.file}: the worker that read it failed ({what})."
    if trace is None:
        return task.number, None, reason.replace(_arguments(task)[0], task.file)
    return task.number, replace(trace, meta=relocated(trace.meta, task.file, task.rank)), ""


def _warn_of_local_cluster(kind: str, where: str, guarded: bool = False) -> None:
    """Logs a warning (to stderr unless logging is configured) that a cluster was started here, and who can connect to it."""
    whom = "which asks for its token"
    if not guarded:
        whom = (
            "which needs no password: while the traces are read, every user who can reach that address can run "
            "code as you"
        )
    logging.getLogger(__name__).warning(
        "ddpdoctor: a %s cluster was started on this machine at %s, %s.", kind, where, whom
    )


@contextmanager
def _dask(place: str, workers: int | None) -> Iterator[_Cluster]:
    """The Dask cluster at ``place`` (HOST:PORT), else that of Dask's settings ($DASK_SCHEDULER_ADDRESS), else a new one.

    A new cluster runs on this machine with ``workers`` processes (default: Dask's choice).
    """
    import dask  # type: ignore[import-not-found]
    from dask.distributed import as_completed  # type: ignore[import-not-found]

    with ExitStack() as opened:
        address = f"tcp://{place}" if place else dask.config.get("scheduler-address", None)
        client = _dask_client(address, workers, opened)
        done = as_completed(loop=client.loop)

        def submit(*arguments: Any) -> Any:
            future = client.submit(read_one, *arguments, pure=False)
            done.add(future)
            return future

        def fetch(future: Any) -> Any:
            try:
                return future.result()
            finally:
                future.release()

        yield _Cluster(max(1, sum(client.nthreads().values())), submit, lambda _: next(done), fetch)


def _dask_client(address: str | None, workers: int | None, opened: ExitStack) -> Any:
    import dask
    from dask.distributed import Client, LocalCluster

    if address is not None:
        try:
            return opened.enter_context(Client(address, timeout="10s", set_as_default=False))
        except (OSError, ValueError) as error:
            raise DdpDoctorError(f"There is no Dask scheduler at {address}: {error}.") from error
    # No retries: a file that exhausts the memory of one worker would kill further ones.
    settings = {"distributed.scheduler.allowed-failures": 0, "distributed.scheduler.http.routes": []}
    opened.enter_context(dask.config.set({**settings, "distributed.worker.http.routes": []}))
    cluster = LocalCluster(
        host=_LOOPBACK,
        n_workers=workers,
        threads_per_worker=1,
        dashboard_address=f"{_LOOPBACK}:0",
        scheduler_kwargs={"dashboard": False},
        worker_dashboard_address=None,
        silence_logs=logging.CRITICAL,
    )
    opened.enter_context(cluster)
    _warn_of_local_cluster("Dask", cluster.scheduler_address.rpartition("/")[2])
    return opened.enter_context(Client(cluster, set_as_default=False))


@contextmanager
def _ray(place: str, workers: int | None) -> Iterator[_Cluster]:
    """The Ray cluster at ``place`` (HOST:PORT of its client server), else that of $RAY_ADDRESS, else one on this machine.

    On this machine: a running cluster, else a new one with ``workers`` processors (default: all).
    """
    import ray  # type: ignore[import-not-found]

    is_ours = not ray.is_initialized()
    if is_ours:
        _connect_ray(f"ray://{place}" if place else None, workers)
    try:
        # No retries: a file that exhausts the memory of one worker would kill further ones.
        submit = ray.remote(read_one).options(max_retries=0).remote
        slots = max(1, int(ray.cluster_resources().get("CPU", 1)))
        yield _Cluster(slots, submit, lambda running: ray.wait(running)[0][0], ray.get)
    finally:
        if is_ours:
            ray.shutdown()


def _connect_ray(address: str | None, workers: int | None) -> None:
    import ray

    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    named = address or os.environ.get("RAY_ADDRESS")
    try:
        try:
            ray.init(named or "auto", **quiet)
        except ConnectionError:
            if named:
                raise
            _start_ray(workers, quiet)
    except Exception as error:  # Ray raises Exception itself if its processes do not start within 30 s
        where = named or "this machine"
        raise DdpDoctorError(
            f"There is no Ray cluster at {where}: {(str(error) or repr(error)).splitlines()[0]}"
        ) from error


def _start_ray(workers: int | None, quiet: dict[str, Any]) -> None:
    """Starts a cluster that listens on the loopback interface only.

    Ray has this mode for Windows and macOS, controlled by an environment variable and a constant that is set at import. On Linux its
    servers otherwise listen on all interfaces.
    """
    import ray
    from ray._private import ray_constants  # type: ignore[import-not-found]

    variable = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before, clusters = os.environ.get(variable), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[variable], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        ray.init("local", num_cpus=workers, include_dashboard=False, _node_ip_address=_LOOPBACK, **quiet)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before
    # From 2.59 on, Ray requires the user's token by default.
    guarded = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    _warn_of_local_cluster("Ray", ray.util.get_node_ip_address(), guarded)


KINDS = {"dask": ("dask.distributed", _dask), "ray": ("ray", _ray)}
"""Engine → (package, connection to the cluster)."""
