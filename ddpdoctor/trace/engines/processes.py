"""Many traces at once, each in a worker process; one that dies costs the file it was reading and nothing else."""

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

from .worker import ProgressCallback, ProgressMessage, Result, Task

_EXIT_TIMEOUT_S = 5.0
"""How long a process may take to end."""
_MIN_TIMEOUT_S = 600.0
"""What any file may take, for starting on a machine that is busy."""
_UNKNOWN_SIZE_TIMEOUT_S = 3600.0
"""What a file may take whose size is not known: a URL, a pipe."""
_MAX_TIMEOUT_S = 24 * 3600.0
_MIN_BYTES_PER_S = 40_000
"""Of compressed traces; on one busy processor it is four million."""
_PROGRAM = "from ddpdoctor.trace.engines.worker import main; main()"


class _Worker(msgspec.Struct):
    process: subprocess.Popen[bytes]
    channel: Connection
    task: Task
    deadline_s: float = 0.0
    """On the monotonic clock."""

    def submit(self, task: Task) -> None:
        """Sends ``task``. Raises OSError where the process has ended."""
        self.task = task
        self.deadline_s = time.monotonic() + _timeout_s(task.file)
        self.channel.send(task)

    def stop(self) -> int | None:
        """Ends the process, by force if need be; its exit code.

        None where even that does not help, as on a file system that hangs.
        """
        self.channel.close()
        for _ in range(2):
            try:
                return self.process.wait(timeout=_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return None


def read_in_processes(tasks: Sequence[Task], workers: int, on_progress: ProgressCallback) -> Iterator[Result]:
    """Results of ``tasks`` as they come, with at most ``workers`` processes; ``told`` of each how far it is."""
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
                    message = worker.channel.recv()
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
        # The threads of NumPy's linear algebra spin as they start, and have nothing to do.
        "OPENBLAS_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p or str(Path.cwd()) for p in sys.path),
    }
    with theirs:
        process = subprocess.Popen(
            # -P: nothing is imported from the folder that we happen to be in, which may be anybody's.
            [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us: we end the workers
        )
    channel = Connection(ours.detach())
    worker = _Worker(process, channel, task)
    try:
        worker.submit(task)
    except OSError:
        pass  # it died at once: seen, and told, when its answer is read
    return worker


def _timeout_s(file: str) -> float:
    """How long a file may take: a hundred times what it usually does."""
    try:
        status = Path(file_of(file)).stat()
    except OSError:  # a URL, or gone
        return _UNKNOWN_SIZE_TIMEOUT_S
    if not stat.S_ISREG(status.st_mode):
        return _UNKNOWN_SIZE_TIMEOUT_S
    return min(
        _MIN_TIMEOUT_S + status.st_size / _MIN_BYTES_PER_S, _MAX_TIMEOUT_S
    )  # a file of holes has any size


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
