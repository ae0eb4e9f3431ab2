"""Many traces at once, each in a worker process; one that dies costs the file it was reading and nothing
else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from ddpdoctor.trace.worker import Job, Result

_PROGRAM = "from ddpdoctor.trace.worker import main; main()"


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    channel: Connection
    job: Job

    def stop(self) -> None:
        self.channel.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def load_in_processes(jobs: Sequence[Job], workers: int) -> Iterator[Result]:
    """Results of ``jobs`` as they come, with at most ``workers`` processes."""
    waiting = deque(jobs)
    busy: dict[Connection, _Worker] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                worker = _start(waiting.popleft())
                busy[worker.channel] = worker
            for channel in wait(list(busy)):
                worker = busy[channel]  # type: ignore[index]
                try:
                    yield worker.channel.recv()
                    if waiting:
                        worker.job = waiting.popleft()
                        worker.channel.send(worker.job)
                        continue
                except (EOFError, OSError):
                    yield _died(worker)
                del busy[worker.channel]
                worker.stop()
    finally:
        for worker in busy.values():
            worker.process.kill()
            worker.stop()


def _start(job: Job) -> _Worker:
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or str(Path.cwd()) for p in sys.path)}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us: we end the workers
        )
    channel = Connection(ours.detach())
    worker = _Worker(process, channel, job)
    try:
        channel.send(job)
    except OSError:
        pass  # it died at once: seen, and told, when its answer is read
    return worker


def _died(worker: _Worker) -> Result:
    number, file, _, _ = worker.job
    code = worker.process.wait()
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    hint = "; it probably ran out of memory: try --jobs 1" if code == -9 else ""
    return number, None, f"{file}: the process that read it ended {how}{hint}."
