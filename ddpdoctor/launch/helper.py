"""Helper processes forked from the launcher, for work that may block: access to storage that may have stopped answering, and analyses.

SIGKILL does not end a process that waits for storage in the kernel (state D). The launcher therefore never does such work itself; it
abandons a helper process that is blocked.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ddpdoctor.process import die_with_parent, is_readable
from ddpdoctor.telemetry import procfs

Beat = Callable[[], None]
"""Heartbeat function, to be called while work makes progress."""

_BEAT, _RESULT, _ERROR = b".", b"r", b"e"
_SIZE = struct.Struct("<Q")
_LEAST_BEAT_S = 0.1
_PIECE_BYTES = 1 << 16
POLL_S = 0.05
_RUNNABLE_FACTOR = 5
"""Factor on the timeout while the child is not blocked in the kernel."""
_Result = TypeVar("_Result")


class StorageTimeoutError(OSError):
    """The storage did not answer in time."""


class ForkRefusedError(OSError):
    """No further process is allowed (``ulimit -u``, a cgroup's ``pids.max``)."""


class HeartbeatTimeout:
    """Timeout since a child's last heartbeat. It is ``_RUNNABLE_FACTOR`` times as long unless the child is blocked in the kernel (state D):
    the child may wait for a processor, or for something that has its own deadline.
    """

    def __init__(self, pid: int, timeout_s: float) -> None:
        self._pid, self._timeout_s = pid, timeout_s
        self.restart()

    def restart(self) -> None:
        """Restart the clock after a heartbeat."""
        self._since_s = time.monotonic()

    def check(self) -> None:
        """Raise StorageTimeoutError if the last heartbeat is too long ago."""
        silent_s = time.monotonic() - self._since_s
        is_blocked = procfs.state_of(self._pid) == "D"
        most_s = self._timeout_s if is_blocked else self._timeout_s * _RUNNABLE_FACTOR
        if silent_s > most_s:
            raise StorageTimeoutError("its storage does not answer")


def run_with_timeout(work: Callable[[Beat], _Result], timeout_s: float) -> _Result:
    """Call ``work`` in a forked process. Returns its result or raises its exception, which must be picklable. Main thread only.

    Raises StorageTimeoutError, and abandons the process, if its last heartbeat is more than ``timeout_s`` ago.
    """
    try:
        pid, reader = _fork(lambda writer: _send_result(work, writer))
    except ForkRefusedError:
        return work(lambda: None)
    try:
        kind, data = _receive_result(reader, HeartbeatTimeout(pid, timeout_s))
    finally:
        os.close(reader)
        abandon(pid)
    if kind == _ERROR:
        raise pickle.loads(data)
    found: _Result = pickle.loads(data)
    return found


def _fork(work: Callable[[int], None], *kept: int) -> tuple[int, int]:
    """Call ``work(writer)`` in a forked process that keeps only the open files ``kept`` and ``writer`` (a pipe). Returns its process id
    and the pipe's read end. Raises ForkRefusedError, or OSError if no pipe can be made."""
    reader, writer = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        raise ForkRefusedError(*error.args) from error
    if pid == 0:
        try:
            close_inherited_files([writer, *kept])
            work(writer)
        finally:
            os._exit(0)
    os.close(writer)
    return pid, reader


def abandon(pid: int) -> None:
    """Kill a child that may be blocked for ever, without waiting for its end."""
    with suppress(ProcessLookupError, ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0] == 0:  # not reaped yet, so the id has not been reused
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)


def close_inherited_files(kept: Iterable[int]) -> None:
    """Close all files except ``kept``. Readers of the job's pipes would otherwise wait for this process, which may outlive the job."""
    keep = set(kept)
    for name in [path.name for path in Path("/proc/self/fd").iterdir()]:
        if int(name) not in keep:
            with suppress(OSError):
                os.close(int(name))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in set(range(3)) - keep - {nowhere}:
        os.dup2(nowhere, number)


def prefer_for_oom_kill() -> None:
    """Let the kernel kill this process and its children first if memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def heartbeat_to(writer: int, sign: bytes = _BEAT) -> Beat:
    """A heartbeat function that writes ``sign`` to the open file ``writer``, at most every ``_LEAST_BEAT_S`` seconds."""
    last_s = 0.0

    def beat() -> None:
        nonlocal last_s
        if time.monotonic() - last_s > _LEAST_BEAT_S:
            last_s = time.monotonic()
            with suppress(OSError):  # the read end is closed
                os.write(writer, sign)

    return beat


def _send_result(work: Callable[[Beat], object], writer: int) -> None:
    try:
        answer, kind = pickle.dumps(work(heartbeat_to(writer))), _RESULT
    except Exception as error:
        answer, kind = _pickled(error), _ERROR
    answer = kind + _SIZE.pack(len(answer)) + answer
    while answer:
        answer = answer[os.write(writer, answer) :]


def _pickled(error: Exception) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return pickle.dumps(OSError(f"{type(error).__name__}: {error}"))
    return data


def _receive_result(reader: int, timeout: HeartbeatTimeout) -> tuple[bytes, bytes]:
    """Wait for the answer. Returns its kind and its bytes. Raises StorageTimeoutError, OSError."""
    data = b""
    while True:
        data = data.lstrip(_BEAT)
        head = 1 + _SIZE.size
        if len(data) >= head and len(data) >= head + _SIZE.unpack(data[1:head])[0]:
            return data[:1], data[head:]
        while not is_readable(reader, POLL_S):
            timeout.check()
        timeout.restart()
        piece = os.read(reader, _PIECE_BYTES)
        if not piece:
            raise OSError("the process that was to write to it has died")
        data += piece


JOB_ENDED = b"."
"""Message of a launcher whose job has ended. A launcher that was killed sends nothing."""
_ANSWER_BYTES = 1 << 16
_UNLISTENED_S = 5.0
"""Time for a helper process to end if no thread listens to it."""
_HELPER_NICENESS = 5
"""Gives the job's processes priority if processors are short."""

Work = Callable[[int, int], None]
"""Main function of a helper process, called with two pipes: ``orders`` is readable once the job has ended or the launcher is gone;
messages to the launcher are written to ``writer``."""


class HelperProcess:
    """The launcher's handle of a long-running helper process. Main thread only."""

    def __init__(self, name: str, work: Work) -> None:
        self._name, self._work = name, work
        self._pid = self._orders = self._answers = 0
        self._timeout: HeartbeatTimeout | None = None
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        """Start the process. Start all helper processes before the first ``listen``, because a process that forks must have no other
        thread. Raises OSError."""
        orders, self._orders = os.pipe()
        try:
            self._pid, self._answers = _fork(lambda writer: self._run(orders, writer), orders)
        except OSError:
            os.close(self._orders)
            raise
        finally:
            os.close(orders)

    def _run(self, orders: int, writer: int) -> None:
        # A signal to the whole process group, for example from a terminal, is meant for the job.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        os.nice(_HELPER_NICENESS)
        self._work(orders, writer)

    def listen(self, on_message: Callable[[dict[str, Any]], None], timeout_s: float) -> None:
        """Start a thread that passes the process's messages to ``on_message``. Does nothing if the process was not started."""
        if not self._pid:
            return
        self._timeout = HeartbeatTimeout(self._pid, timeout_s)
        reader = threading.Thread(
            target=_listen,
            args=(self._answers, self._timeout, on_message),
            name=f"ddpdoctor-{self._name}",
            daemon=True,
        )
        # If no further thread is allowed, the process works all the same, and its messages are not read.
        with suppress(RuntimeError):
            reader.start()
            self._reader = reader

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Read the process's only message, if ``listen`` was not called. Empty after ``timeout_s`` or if the process has died."""
        data = os.read(self._answers, _ANSWER_BYTES) if is_readable(self._answers, timeout_s) else b""
        found: dict[str, Any] = json.loads(data) if data else {}
        return found

    def stop(self, most_s: float) -> None:
        """End the process, if ``listen`` was not called; kill it after ``most_s``. Does nothing if it was not started."""
        if not self._pid:
            return
        self._send_end()
        deadline_s = time.monotonic() + most_s
        while (left_s := deadline_s - time.monotonic()) > 0 and is_readable(self._answers, left_s):
            if not os.read(self._answers, _ANSWER_BYTES):
                break
        os.close(self._answers)
        abandon(self._pid)

    def _send_end(self) -> None:
        with suppress(OSError):  # the process has died
            os.write(self._orders, JOB_ENDED)
        os.close(self._orders)

    def end(self) -> None:
        """Let the process finish. Raises StorageTimeoutError, and abandons the process, if its heartbeat stops."""
        if not self._pid or self._timeout is None:
            return
        if self._reader is None:
            self.stop(_UNLISTENED_S)
            return
        self._send_end()
        self._timeout.restart()
        try:
            while self._reader.is_alive():
                self._reader.join(POLL_S)
                if self._reader.is_alive():
                    self._timeout.check()
        finally:
            abandon(self._pid)


def _listen(answers: int, timeout: HeartbeatTimeout, on_message: Callable[[dict[str, Any]], None]) -> None:
    with os.fdopen(answers, "rb") as lines:
        for line in lines:
            timeout.restart()
            if line.strip():
                on_message(json.loads(line))


def send(writer: int, **what: Any) -> None:
    """Send a message to the launcher. Does nothing if the launcher is gone."""
    with suppress(OSError):
        os.write(writer, json.dumps(what).encode() + b"\n")


_ANALYSIS_S = 600.0
"""The same limit as for the analysis after a short job."""
_ANALYSIS_NICENESS = 10
"""Added to the niceness of the process that starts the analysis."""
_MOST_SENTENCE_BYTES = 1 << 14
"""Longest answer (a sentence). It fits into a pipe's buffer, so neither side waits for the other."""


class AnalysisProcess:
    """Analysis of a run while its job hangs, in a separate process, for use from an event loop."""

    def __init__(self, diagnose: Callable[[], str] | None) -> None:
        """``diagnose`` returns a sentence for the user, also if it fails; None: no analysis."""
        self._diagnose = diagnose
        self._pid, self._reader = 0, -1
        self._deadline_s = 0.0

    @property
    def handles(self) -> list[int]:
        """File descriptors that are readable once ``sentence`` has an answer."""
        return [self._reader] if self._reader >= 0 else []

    def start(self) -> None:
        """Start the analysis. An earlier one that still runs is ended, because its hang is over."""
        self.abandon()
        diagnose, parent = self._diagnose, os.getpid()
        if diagnose is None:
            return

        def work(writer: int) -> None:
            die_with_parent(signal.SIGKILL)
            os.nice(_ANALYSIS_NICENESS)
            prefer_for_oom_kill()
            if os.getppid() == parent:
                os.write(writer, diagnose().encode()[:_MOST_SENTENCE_BYTES])

        with suppress(OSError):  # no further process is allowed
            self._pid, self._reader = _fork(work)
            self._deadline_s = time.monotonic() + _ANALYSIS_S

    def sentence(self) -> str | None:
        """The sentence of the analysis; None if it has not ended or gave none."""
        if self._reader < 0:
            return None
        if is_readable(self._reader, 0):
            text = os.read(self._reader, _MOST_SENTENCE_BYTES).decode(errors="replace")
            self.abandon()
            return text or None
        if time.monotonic() > self._deadline_s:
            self.abandon()
        return None

    def abandon(self) -> None:
        """Kill the analysis, without waiting for its end."""
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1
            abandon(self._pid)
