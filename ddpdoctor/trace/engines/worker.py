"""Reads traces in a process of its own: a program that answers over one socket.

Started as a program rather than by :mod:`multiprocessing`: nothing of the caller's ``__main__`` runs again,
and no thread of the caller is forked.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.parentdeath import die_with_parent
from ddpdoctor.trace.cache import cached_load
from ddpdoctor.trace.columns import RankTrace
from ddpdoctor.trace.formats import load_trace

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Result = tuple[int, RankTrace | None, str]
"""Number of the task, and its trace or the reason why there is none."""


class Task(NamedTuple):
    """A file to be read."""

    number: int
    file: str
    rank: int | None
    """Where whoever asks knows it."""
    cache: bool
    """Whether to use and fill the cache."""


def attempt(file: str, rank: int | None, cache: bool) -> tuple[RankTrace | None, str]:
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


def load_here(tasks: Sequence[Task]) -> Iterator[Result]:
    """Results of ``tasks`` in order, read in this process."""
    for task in tasks:
        yield (task.number, *attempt(task.file, task.rank, task.cache))


def serve(channel: Connection) -> None:
    """Answers tasks until the other side closes."""
    while True:
        try:
            number, file, rank, cache = channel.recv()
        except EOFError:
            return
        trace, reason = attempt(file, rank, cache)
        try:
            channel.send((number, trace, reason))
        except OSError:
            return


def main() -> None:
    """Serves the socket whose number is the program's one argument."""
    from multiprocessing.connection import Connection

    # It has a session of its own, so whoever ends us by a signal would leave it behind.
    die_with_parent(signal.SIGKILL)
    serve(Connection(int(sys.argv[1])))
