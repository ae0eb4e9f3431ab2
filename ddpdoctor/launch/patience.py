"""Work on a run directory whose storage may have stopped answering: neither the job nor its launcher may wait for it.

A process in the midst of asking for a file cannot be relied on to end: what two look up at once, the second waits for, and
not even SIGKILL ends that wait. So such work is done in a process that can be left behind.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn, TypeVar

from ddpdoctor.readable import is_readable

Beat = Callable[[], None]
"""To be called while work gets on."""

_BEAT, _RESULT, _ERROR = b".", b"r", b"e"
_SIZE = struct.Struct("<Q")
_LEAST_BEAT_S = 0.1
_PIECE_BYTES = 1 << 16
LOOK_S = 0.05
_LONGER = 5
"""Times the patience with a child that is not kept waiting by the kernel."""
_Result = TypeVar("_Result")


class NoAnswerError(OSError):
    """The storage did not answer in time."""


class Patience:
    """With a child that beats while it gets on. One that merely gets no processor, or waits for something that has a
    deadline of its own, is given longer than one that the kernel keeps waiting.
    """

    def __init__(self, pid: int, patience_s: float) -> None:
        self._pid, self._patience_s = pid, patience_s
        self.renew()

    def renew(self) -> None:
        """It has beaten."""
        self._since_s = time.monotonic()

    def ask(self) -> None:
        """Raises NoAnswerError once there is none left."""
        silent_s = time.monotonic() - self._since_s
        most_s = self._patience_s if _is_kept_waiting(self._pid) else self._patience_s * _LONGER
        if silent_s > most_s:
            raise NoAnswerError("its storage does not answer")


def _is_kept_waiting(pid: int) -> bool:
    """Whether the kernel keeps the main thread of a process from running until something answers."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "D"
    except (OSError, IndexError):
        return False


def bounded(work: Callable[[Beat], _Result], patience_s: float) -> _Result:
    """What ``work`` returns, or raises, both of which can be pickled; it is done in a forked process, which is left
    behind, with NoAnswerError raised, once it has not beaten for ``patience_s``. For the main thread.
    """
    reader, writer = os.pipe()
    try:
        pid = os.fork()
    except OSError:  # no further process is allowed
        os.close(reader)
        os.close(writer)
        return work(lambda: None)
    if pid == 0:
        _live(work, writer)
    os.close(writer)
    try:
        kind, data = _answer(reader, Patience(pid, patience_s))
    finally:
        os.close(reader)
        leave(pid)
    if kind == _ERROR:
        raise pickle.loads(data)
    found: _Result = pickle.loads(data)
    return found


def leave(pid: int) -> None:
    """End a child that may have stopped for good, without waiting for it."""
    try:
        if os.waitpid(pid, os.WNOHANG)[0] == 0:  # not waited for yet, so the id is still its own
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
    except (ProcessLookupError, ChildProcessError):
        pass


def hold_no_streams(kept: Iterable[int]) -> None:
    """Close all files of this process but ``kept``: an end of the job's pipes kept open here would keep their readers
    waiting, and this process may stay when all others have ended."""
    keep = set(kept)
    for name in [path.name for path in Path("/proc/self/fd").iterdir()]:
        if int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:
                pass
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in set(range(3)) - keep - {nowhere}:
        os.dup2(nowhere, number)


def prefer_for_oom_kill() -> None:
    """Where memory runs out, the kernel is to end this process and what it starts."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        pass


def beating(writer: int, sign: bytes = _BEAT) -> Beat:
    """Writes ``sign`` to the open file ``writer``, now and then."""
    last_s = 0.0

    def beat() -> None:
        nonlocal last_s
        if time.monotonic() - last_s > _LEAST_BEAT_S:
            last_s = time.monotonic()
            try:
                os.write(writer, sign)
            except OSError:
                pass  # whoever listened is gone

    return beat


def _live(work: Callable[[Beat], object], writer: int) -> NoReturn:
    try:
        hold_no_streams([writer])
        try:
            answer, kind = pickle.dumps(work(beating(writer))), _RESULT
        except Exception as error:
            answer, kind = _pickled(error), _ERROR
        answer = kind + _SIZE.pack(len(answer)) + answer
        while answer:
            answer = answer[os.write(writer, answer) :]
    finally:
        os._exit(0)


def _pickled(error: Exception) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return pickle.dumps(OSError(f"{type(error).__name__}: {error}"))
    return data


def _answer(reader: int, patience: Patience) -> tuple[bytes, bytes]:
    """The kind of the answer, and its bytes."""
    data = b""
    while True:
        data = data.lstrip(_BEAT)
        head = 1 + _SIZE.size
        if len(data) >= head and len(data) >= head + _SIZE.unpack(data[1:head])[0]:
            return data[:1], data[head:]
        while not is_readable(reader, LOOK_S):
            patience.ask()
        patience.renew()
        piece = os.read(reader, _PIECE_BYTES)
        if not piece:
            raise OSError("the process that was to write to it has died")
        data += piece
