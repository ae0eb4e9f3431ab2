"""Reads traces in a process of its own: a program that answers over one socket.

Started as a program rather than by :mod:`multiprocessing`: nothing of the caller's ``__main__`` runs again,
and no thread of the caller is forked.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.parentdeath import die_with_parent
from ddpdoctor.trace.cache import cached_load
from ddpdoctor.trace.columns import RankTrace
from ddpdoctor.trace.formats import load_trace
from ddpdoctor.trace.sources import progress_to

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Result = tuple[int, RankTrace | None, str]
"""Number of the task, and its trace or the reason why there is none."""


ProgressCallback = Callable[[int, float], None]
"""Is told the number of a task and which part of it is done, 0 to 1."""
_PROGRESS_INTERVAL_S = 0.2
"""A line that moves five times a second moves smoothly enough."""


class ProgressMessage(NamedTuple):
    """How far a process is with a task, as it says before it has the result."""

    number: int
    done: float


class Task(NamedTuple):
    """A file to be read."""

    number: int
    file: str
    rank: int | None
    """Where whoever asks knows it."""
    cache: bool
    """Whether to use and fill the cache."""


def read_one(file: str, rank: int | None, cache: bool) -> tuple[RankTrace | None, str]:
    """One trace, or one sentence that says why it cannot be used."""
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
    """Results of ``tasks`` in order, read in this process; ``told`` of each how far it is."""
    for task in tasks:
        with progress_to(partial(on_progress, task.number)):
            result = read_one(task.file, task.rank, task.cache)
        yield (task.number, *result)


def serve(channel: Connection) -> None:
    """Answers tasks until the other side closes."""
    while True:
        try:
            number, file, rank, cache = channel.recv()
        except EOFError:
            return
        with progress_to(_progress_sender(channel, number)):
            trace, reason = read_one(file, rank, cache)
        try:
            channel.send((number, trace, reason))
        except OSError:
            return


def _progress_sender(channel: Connection, number: int) -> Callable[[float], None]:
    """What says by ``channel`` how far a task is, now and then."""
    sent_s = time.monotonic()

    def send(part: float) -> None:
        nonlocal sent_s
        if time.monotonic() - sent_s < _PROGRESS_INTERVAL_S:
            return
        sent_s = time.monotonic()
        with suppress(OSError):  # nobody waits any more, as is seen when the result is sent
            channel.send(ProgressMessage(number, part))

    return send


def main() -> None:
    """Serves the socket whose number is the program's one argument."""
    from multiprocessing.connection import Connection

    # It has a session of its own, so whoever ends us by a signal would leave it behind.
    die_with_parent(signal.SIGKILL)
    serve(Connection(int(sys.argv[1])))
