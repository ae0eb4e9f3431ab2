"""Worker process that reads traces: a program that receives tasks and sends results over one socket.

It is a separate program instead of a :mod:`multiprocessing` child, so the caller's ``__main__`` is not run again and no
threads are forked.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.parentdeath import die_with_parent
from ddpdoctor.trace.cache import cached_load
from ddpdoctor.trace.columns import RankTrace
from ddpdoctor.trace.formats import load_trace
from ddpdoctor.trace.sources import progress_to

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Result = tuple[int, RankTrace | None, str]
"""(number of the task, trace or None, reason why there is none)."""


ProgressCallback = Callable[[int, float], None]
"""Called with the number of a task and the share of it that is done, 0 to 1."""
_PROGRESS_INTERVAL_S = 0.2
"""A progress line needs no more than five updates per second."""


class ProgressMessage(NamedTuple):
    """Progress of a task, sent by a worker before the result."""

    number: int
    done: float


class Task(NamedTuple):
    """A file to be read."""

    number: int
    file: str
    rank: int | None
    """None if the caller does not know it."""
    cache: bool
    """Whether to use and fill the cache."""


_KEPT_BYTES = 31 << 20
"""Less than the 32 MiB up to which glibc raises the size that it returns to the system at once."""


def keep_freed_memory() -> None:
    """Lets the C library keep the memory of freed columns for the next ones, up to 60 MB.

    By default glibc returns blocks of 128 KiB and more to the system, which clears each page again for the next block. When a larger
    block is freed, that limit rises to its size: https://man7.org/linux/man-pages/man3/mallopt.3.html (M_MMAP_THRESHOLD).
    """
    np.empty(_KEPT_BYTES, np.uint8)


def read_one(file: str, rank: int | None, cache: bool) -> tuple[RankTrace | None, str]:
    """(trace, "") or (None, a sentence with the reason why it cannot be read). Never raises."""
    try:
        return cached_load(file, rank) if cache else load_trace(file, rank), ""
    except DdpDoctorError as error:
        return None, str(error)
    except MemoryError:
        return None, f"{file} does not fit in this machine's memory."
    except RecursionError:
        return None, f"{file} cannot be read: it is nested too deeply."
    except Exception as error:  # one bad file must not cost the others
        return None, f"{file} cannot be read ({type(error).__name__}: {error})."


def read_serially(tasks: Sequence[Task], on_progress: ProgressCallback) -> Iterator[Result]:
    """Yields the results of ``tasks`` in order, read in this process; calls ``on_progress`` meanwhile."""
    for task in tasks:
        with progress_to(partial(on_progress, task.number)):
            result = read_one(task.file, task.rank, task.cache)
        yield (task.number, *result)


def serve(channel: Connection) -> None:
    """Reads tasks from ``channel`` and sends results until the other side closes it."""
    while True:
        try:
            number, file, rank, cache = channel.recv()
        except EOFError:
            return
        with progress_to(_progress_sender(channel, number)):
            trace, reason = read_one(file, rank, cache)
        try:
            _send(channel, (number, trace, reason))
        except OSError:
            return


def _send(channel: Connection, result: Result) -> None:
    """Sends a result, and then its columns as they lie in memory: in a pickle they are copied six times."""
    columns: list[pickle.PickleBuffer] = []
    content = pickle.dumps(result, protocol=5, buffer_callback=columns.append)
    parts = [column.raw() for column in columns]
    channel.send((content, [part.nbytes for part in parts]))
    for part in parts:
        while part:
            part = part[os.write(channel.fileno(), part) :]


def receive(channel: Connection) -> Result | ProgressMessage:
    """What :func:`serve` sends next. Raises EOFError or OSError if the process at the other side has ended."""
    message: ProgressMessage | tuple[bytes, list[int]] = channel.recv()
    if isinstance(message, ProgressMessage):
        return message
    content, sizes = message
    columns = [np.empty(size, np.uint8) for size in sizes]
    for column in columns:
        part = column.data
        while part:
            if not (received := os.readv(channel.fileno(), [part])):
                raise EOFError
            part = part[received:]
    result: Result = pickle.loads(content, buffers=columns)
    return result


def _progress_sender(channel: Connection, number: int) -> Callable[[float], None]:
    """A callback that sends :class:`ProgressMessage` for a task over ``channel``, at most every ``_PROGRESS_INTERVAL_S``."""
    sent_s = time.monotonic()

    def send(part: float) -> None:
        nonlocal sent_s
        if time.monotonic() - sent_s < _PROGRESS_INTERVAL_S:
            return
        sent_s = time.monotonic()
        with suppress(OSError):  # the other side has closed; noticed when the result is sent
            channel.send(ProgressMessage(number, part))

    return send


def main() -> None:
    """Serves the socket whose file descriptor is the only argument of the program."""
    from multiprocessing.connection import Connection

    # It has its own session, so a signal that kills the parent does not reach it.
    die_with_parent(signal.SIGKILL)
    keep_freed_memory()
    serve(Connection(int(sys.argv[1])))
