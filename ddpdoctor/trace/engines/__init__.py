"""Where traces are read: in this process, in processes of this machine, on a Dask or a Ray cluster.

Tasks go in (a file, its rank, whether to use the cache); each one's columns come out as they are done, or one sentence why
there are none. A file is read by one function (``worker``) wherever that is, so the results are the same; a worker
that dies or hangs costs the file that it was reading, and the others go on. What an engine needs is imported when it is
asked for.
"""

from .choice import KINDS, Engine, in_processes, open_engine
from .worker import Result, Task, Told, attempt, load_here, serve
