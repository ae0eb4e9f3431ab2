"""Reads traces in this process or in worker processes of this machine. If a worker dies or hangs, only the file that it reads fails.

A worker receives tasks and sends results over one socket. It is a separate program instead of a :mod:`multiprocessing` child, so that the
caller's ``__main__`` is not run again and no threads are forked.
"""

from __future__ import annotations

import os
import pickle
import signal
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.process import die_with_parent
from ddpdoctor.trace.cache import cached_load
from ddpdoctor.trace.columns import RankTrace
from ddpdoctor.trace.formats import file_of, load_trace
from ddpdoctor.trace.sources import progress_to

if TYPE_CHECKING:  # imported when processes are started: the import takes longer than reading a small trace
    import subprocess
    from multiprocessing.connection import Connection

Result = tuple[int, RankTrace | None, str]
"""(Number of the task, trace or None, reason why there is none)."""
ProgressCallback = Callable[[int, float], None]
"""Called with the number of a task and its completed share, 0 to 1."""
_PROGRESS_INTERVAL_S = 0.2
"""Shortest time between two progress messages."""


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


Engine = Callable[[Sequence[Task]], Iterator[Result]]
"""Function that reads traces and yields the result of each task as it finishes. If a worker dies, only the file that it reads fails. Ending
the iteration early cancels the other tasks. Raises DdpDoctorError if the engine cannot be reached."""
_KEPT_BYTES = 31 << 20
"""Just below 32 MiB, up to which glibc raises the size from which blocks are returned to the system at once."""


def keep_freed_memory() -> None:
    """Makes the C library keep the memory of freed columns for the next ones, up to 60 MB.

    By default glibc returns blocks of 128 KiB and more to the system, which clears each page again for the next block. When a larger
    block is freed, that limit rises to its size: https://man7.org/linux/man-pages/man3/mallopt.3.html (M_MMAP_THRESHOLD).
    """
    np.empty(_KEPT_BYTES, np.uint8)


def read_one(file: str, rank: int | None, cache: bool) -> tuple[RankTrace | None, str]:
    """(trace, "") or (None, a sentence with the reason why it cannot be read). Never raises."""
    try:
        return (cached_load(file, rank) if cache else load_trace(file, rank)).narrowed(), ""
    except DdpDoctorError as error:
        return None, str(error)
    except MemoryError:
        return None, f"{file} does not fit in this machine's memory."
    except RecursionError:
        return None, f"{file} cannot be read: it is nested too deeply."
    except Exception as error:  # an invalid file must not affect the others
        return None, f"{file} cannot be read ({type(error).__name__}: {error})."


def read_serially(tasks: Sequence[Task], on_progress: ProgressCallback) -> Iterator[Result]:
    """Yields the results of ``tasks`` in order, read in this process. Calls ``on_progress`` while reading."""
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
    """Sends a result without its columns, then the raw bytes of the columns, which would be copied six times in a pickle."""
    columns: list[pickle.PickleBuffer] = []
    content = pickle.dumps(result, protocol=5, buffer_callback=columns.append)
    parts = [column.raw() for column in columns]
    channel.send((content, [part.nbytes for part in parts]))
    for part in parts:
        while part:
            part = part[os.write(channel.fileno(), part) :]


def receive(channel: Connection) -> Result | ProgressMessage:
    """The next message of :func:`serve`. Raises EOFError or OSError if the other process has ended."""
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
        with suppress(OSError):  # the other side has closed; handled when the result is sent
            channel.send(ProgressMessage(number, part))

    return send


def main() -> None:
    """Serves the socket whose file descriptor is the only argument of the program."""
    from multiprocessing.connection import Connection

    # This process has its own session, so a signal to the parent's process group does not reach it.
    die_with_parent(signal.SIGKILL)
    keep_freed_memory()
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # without clearing all modules, for which the caller would wait


_EXIT_TIMEOUT_S = 5.0
"""Time for a process to exit before it is killed."""
_MIN_TIMEOUT_S = 600.0
"""Minimum time limit of a file, for busy machines."""
_UNKNOWN_SIZE_TIMEOUT_S = 3600.0
"""Time limit of a file of unknown size: a URL or a pipe."""
_MAX_TIMEOUT_S = 24 * 3600.0
_MIN_BYTES_PER_S = 40_000
"""Slowest accepted rate of reading a compressed trace. A busy processor reads about four million bytes per second."""
_PROGRAM = "import gc; gc.disable(); from ddpdoctor.trace.processes import main; main()"
"""Program of a worker. Without garbage collection imports take a tenth less time; reading disables it anyway."""


class _Worker(msgspec.Struct):
    process: subprocess.Popen[bytes]
    channel: Connection
    task: Task
    deadline_s: float = 0.0
    """Monotonic seconds."""

    def submit(self, task: Task) -> None:
        """Sends ``task`` to the process. Raises OSError if it has exited."""
        self.task = task
        self.deadline_s = time.monotonic() + _timeout_s(task.file)
        self.channel.send(task)

    def stop(self) -> int | None:
        """Stops the process, by SIGKILL if it does not exit, and returns its exit code.

        None if it cannot be killed, for example during a call to a file system that hangs.
        """
        import subprocess

        self.channel.close()
        for _ in range(2):
            try:
                return self.process.wait(timeout=_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return None


def read_in_processes(tasks: Sequence[Task], workers: int, on_progress: ProgressCallback) -> Iterator[Result]:
    """Yields the results of ``tasks`` as they finish, with at most ``workers`` processes. Calls ``on_progress`` while reading."""
    from multiprocessing.connection import wait

    waiting = deque(tasks)
    busy: dict[Connection, _Worker] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                worker = _start(waiting.popleft())
                busy[worker.channel] = worker
            soonest_s = min(worker.deadline_s for worker in busy.values())
            for channel in wait(list(busy), max(0.0, soonest_s - time.monotonic())):
                worker = busy[channel]  # type: ignore[index]
                try:
                    message = receive(worker.channel)
                    if isinstance(message, ProgressMessage):
                        on_progress(*message)
                        continue
                    yield message
                    if waiting:
                        worker.submit(waiting.popleft())
                        continue
                except (EOFError, OSError):
                    yield _died(worker)
                del busy[worker.channel]
                worker.stop()
            for worker in [worker for worker in busy.values() if worker.deadline_s < time.monotonic()]:
                del busy[worker.channel]
                worker.process.kill()
                worker.stop()
                yield _timed_out(worker)
    finally:
        for worker in busy.values():
            worker.process.kill()
            worker.stop()


def _start(task: Task) -> _Worker:
    import socket
    import subprocess
    from multiprocessing.connection import Connection

    ours, theirs = socket.socketpair()
    environment = {
        # OpenBLAS threads would use CPU time at their start and are not needed.
        "OPENBLAS_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p or str(Path.cwd()) for p in sys.path),
    }
    with theirs:
        process = subprocess.Popen(
            # -P: do not import from the working directory, which another user may be able to write.
            [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only this process, which then stops the workers
        )
    channel = Connection(ours.detach())
    worker = _Worker(process, channel, task)
    try:
        worker.submit(task)
    except OSError:
        pass  # it has exited, which is reported when its result is read
    return worker


def _timeout_s(file: str) -> float:
    """Time limit for reading ``file``, s: a hundred times the usual duration."""
    try:
        status = Path(file_of(file)).stat()
    except OSError:  # a URL, or a missing file
        return _UNKNOWN_SIZE_TIMEOUT_S
    if not stat.S_ISREG(status.st_mode):
        return _UNKNOWN_SIZE_TIMEOUT_S
    # A sparse file may have any size.
    return min(_MIN_TIMEOUT_S + status.st_size / _MIN_BYTES_PER_S, _MAX_TIMEOUT_S)


def _timed_out(worker: _Worker) -> Result:
    task = worker.task
    return task.number, None, f"{task.file}: the process that read it did not finish and was given up."


def _died(worker: _Worker) -> Result:
    task = worker.task
    code = worker.stop()
    if code is None:
        return _timed_out(worker)
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    hint = "; it probably ran out of memory: try --jobs 1" if code == -9 else ""
    return task.number, None, f"{task.file}: the process that read it ended {how}{hint}."
