"""Reads traces in parallel in worker processes; if one dies, only the file that it was reading fails."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec

from ddpdoctor.trace.formats import file_of

from .worker import ProgressCallback, ProgressMessage, Result, Task, receive

_EXIT_TIMEOUT_S = 5.0
"""Longest time for a process to exit before it is killed."""
_MIN_TIMEOUT_S = 600.0
"""Least time limit of a file, for a start on a busy machine."""
_UNKNOWN_SIZE_TIMEOUT_S = 3600.0
"""Time limit of a file of unknown size: a URL or a pipe."""
_MAX_TIMEOUT_S = 24 * 3600.0
_MIN_BYTES_PER_S = 40_000
"""Slowest accepted reading of a compressed trace; a busy processor reads about four million bytes per second."""
_PROGRAM = "import gc; gc.disable(); from ddpdoctor.trace.engines.worker import main; main()"
"""Without garbage collection, which reading disables anyway: imports take a tenth less."""


class _Worker(msgspec.Struct):
    process: subprocess.Popen[bytes]
    channel: Connection
    task: Task
    deadline_s: float = 0.0
    """On the monotonic clock."""

    def submit(self, task: Task) -> None:
        """Sends ``task`` to the process. Raises OSError if it has exited."""
        self.task = task
        self.deadline_s = time.monotonic() + _timeout_s(task.file)
        self.channel.send(task)

    def stop(self) -> int | None:
        """Stops the process, by SIGKILL if it does not exit; returns its exit code.

        None if it cannot be killed, for example in a call to a hanging file system.
        """
        self.channel.close()
        for _ in range(2):
            try:
                return self.process.wait(timeout=_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return None


def read_in_processes(tasks: Sequence[Task], workers: int, on_progress: ProgressCallback) -> Iterator[Result]:
    """Yields the results of ``tasks`` as they finish, with at most ``workers`` processes; calls ``on_progress`` meanwhile."""
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
        pass  # it exited at once: reported when its result is read
    return worker


def _timeout_s(file: str) -> float:
    """Time limit for reading ``file``, s: a hundred times the usual duration."""
    try:
        status = Path(file_of(file)).stat()
    except OSError:  # a URL, or gone
        return _UNKNOWN_SIZE_TIMEOUT_S
    if not stat.S_ISREG(status.st_mode):
        return _UNKNOWN_SIZE_TIMEOUT_S
    return min(
        _MIN_TIMEOUT_S + status.st_size / _MIN_BYTES_PER_S, _MAX_TIMEOUT_S
    )  # a sparse file has any size


def _timed_out(worker: _Worker) -> Result:
    task = worker.task
    return (
        task.number,
        None,
        f"{task.file}: the process that read it did not finish and was given up.",
    )


def _died(worker: _Worker) -> Result:
    task = worker.task
    code = worker.stop()
    if code is None:
        return _timed_out(worker)
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    hint = "; it probably ran out of memory: try --jobs 1" if code == -9 else ""
    return task.number, None, f"{task.file}: the process that read it ended {how}{hint}."
