"""Runs the reading of traces: in this process, in worker processes of this machine, or on a Dask or Ray cluster.

An engine takes tasks (file, rank, whether to use the cache) and yields the columns of each as it finishes, or a sentence
with the reason why there are none. All engines call the same function, :func:`.worker.read_one`, so results do not depend
on the engine. If a worker dies or hangs, only the file that it was reading fails. Dask and Ray are imported only if chosen.
"""

from .choice import KINDS, Engine, in_processes, open_engine
from .worker import (
    ProgressCallback,
    ProgressMessage,
    Result,
    Task,
    keep_freed_memory,
    read_one,
    read_serially,
    receive,
    serve,
)
