"""Processes beside the launcher, forked from it, for work that it must never wait for: on storage that may have stopped answering,
and analyses.

A process in the midst of asking for a file cannot be relied on to end: what two look up at once, the second waits for, and not even
SIGKILL ends that wait. So such work is done in a process that can be left behind.
"""

from __future__ import annotations

import errno
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

from ddpdoctor.launch import procfs
from ddpdoctor.parentdeath import die_with_parent
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
        # The kernel keeps its main thread from running until something answers.
        kept_waiting = procfs.state_of(self._pid) == "D"
        most_s = self._patience_s if kept_waiting else self._patience_s * _LONGER
        if silent_s > most_s:
            raise NoAnswerError("its storage does not answer")


def bounded(work: Callable[[Beat], _Result], patience_s: float) -> _Result:
    """What ``work`` returns, or raises, both of which can be pickled; it is done in a forked process, which is left
    behind, with NoAnswerError raised, once it has not beaten for ``patience_s``. For the main thread.
    """
    try:
        pid, reader = _forked(lambda writer: _answer_with(work, writer))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return work(lambda: None)  # no further process is allowed
    try:
        kind, data = _answer(reader, Patience(pid, patience_s))
    finally:
        os.close(reader)
        leave(pid)
    if kind == _ERROR:
        raise pickle.loads(data)
    found: _Result = pickle.loads(data)
    return found


def _forked(work: Callable[[int], None], *kept: int) -> tuple[int, int]:
    """Do ``work`` in a forked process, which has the open files ``kept`` and the one that it is given to write to: its id, and the end to
    read what it writes. Raises OSError."""
    reader, writer = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        raise
    if pid == 0:
        try:
            hold_no_streams([writer, *kept])
            work(writer)
        finally:
            os._exit(0)
    os.close(writer)
    return pid, reader


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


def _answer_with(work: Callable[[Beat], object], writer: int) -> None:
    try:
        answer, kind = pickle.dumps(work(beating(writer))), _RESULT
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


IN_ORDER = b"."
"""Sent by a launcher whose job has ended; one that was killed sends nothing."""
_ANSWER_BYTES = 1 << 16
_UNHEARD_S = 5.0
"""For the end of one that could not be listened to."""
_BESIDE_NICENESS = 5
"""The job's own processes come first where processors are short."""

Work = Callable[[int, int], None]
"""Done in the process, with the open files by which the launcher says that the job has ended (it can be read then, also where the launcher
is gone), and by which it is answered."""


class Beside:
    """The launcher's side of it. For the main thread."""

    def __init__(self, name: str, work: Work) -> None:
        self._name, self._work = name, work
        self._pid = self._orders = self._answers = 0
        self._patience: Patience | None = None
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        """Start the process. All are started before anybody listens to one: who forks must have no other thread. Raises
        OSError."""
        orders, self._orders = os.pipe()
        try:
            self._pid, self._answers = _forked(lambda writer: self._live(orders, writer), orders)
        except OSError:
            os.close(self._orders)
            raise
        finally:
            os.close(orders)

    def _live(self, orders: int, writer: int) -> None:
        # Whoever signals a whole group, as a terminal does, means the job.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        os.nice(_BESIDE_NICENESS)
        self._work(orders, writer)

    def listen(self, told: Callable[[dict[str, Any]], None], patience_s: float) -> None:
        """What it says goes to ``told`` from now on, in a thread. Nothing where it could not be started."""
        if not self._pid:
            return
        self._patience = Patience(self._pid, patience_s)
        reader = threading.Thread(
            target=_listen,
            args=(self._answers, self._patience, told),
            name=f"ddpdoctor-{self._name}",
            daemon=True,
        )
        try:
            reader.start()
            self._reader = reader
        except RuntimeError:
            pass  # no further thread is allowed: it works on unheard

    def answer(self, patience_s: float) -> dict[str, Any]:
        """The one thing that it says, for who does not listen to it; nothing where that takes longer, or it has died."""
        said = os.read(self._answers, _ANSWER_BYTES) if is_readable(self._answers, patience_s) else b""
        found: dict[str, Any] = json.loads(said) if said else {}
        return found

    def stop(self, most_s: float) -> None:
        """Have it end, for who does not listen to it; killed where it has not within ``most_s``. Nothing where it was not started."""
        if not self._pid:
            return
        self._send_end()
        deadline_s = time.monotonic() + most_s
        while (left_s := deadline_s - time.monotonic()) > 0 and is_readable(self._answers, left_s):
            if not os.read(self._answers, _ANSWER_BYTES):
                break
        os.close(self._answers)
        leave(self._pid)

    def _send_end(self) -> None:
        try:
            os.write(self._orders, IN_ORDER)
        except OSError:
            pass  # it has died
        os.close(self._orders)

    def end(self) -> None:
        """Have it bring what it does to an end. Raises NoAnswerError where it does not get on: it is left behind then."""
        if not self._pid or self._patience is None:
            return
        if self._reader is None:
            self.stop(_UNHEARD_S)
            return
        self._send_end()
        self._patience.renew()
        try:
            while self._reader.is_alive():
                self._reader.join(LOOK_S)
                if self._reader.is_alive():
                    self._patience.ask()
        finally:
            leave(self._pid)


def _listen(answers: int, patience: Patience, told: Callable[[dict[str, Any]], None]) -> None:
    with os.fdopen(answers, "rb") as lines:
        for line in lines:
            patience.renew()
            if line.strip():
                told(json.loads(line))


def say(writer: int, **what: Any) -> None:
    """Tell the launcher; nobody listens where it is gone."""
    try:
        os.write(writer, json.dumps(what).encode() + b"\n")
    except OSError:
        pass


_ANALYSIS_S = 600.0
"""As much as the analysis at the end of a short job may take."""
_ANALYSIS_NICENESS = 10
"""Added to that of the process that starts it."""
_MOST_SENTENCE_BYTES = 1 << 14
"""Of its answer, a sentence; a pipe holds more, so that nobody waits for the other."""


class Diagnosing:
    """For a process that waits for several things at once."""

    def __init__(self, diagnose: Callable[[], str] | None) -> None:
        """``diagnose`` returns a sentence for the user, and says itself what went wrong; None: nobody wants to know."""
        self._diagnose = diagnose
        self._pid, self._reader = 0, -1
        self._deadline_s = 0.0

    @property
    def handles(self) -> list[int]:
        """Readable once there is something to say."""
        return [self._reader] if self._reader >= 0 else []

    def start(self) -> None:
        """Start it; the last one, if it still runs, is about a hang that is over."""
        self.leave()
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
            self._pid, self._reader = _forked(work)
            self._deadline_s = time.monotonic() + _ANALYSIS_S

    def sentence(self) -> str | None:
        """What it has to say; None where nothing yet, or nothing at all."""
        if self._reader < 0:
            return None
        if is_readable(self._reader, 0):
            text = os.read(self._reader, _MOST_SENTENCE_BYTES).decode(errors="replace")
            self.leave()
            return text or None
        if time.monotonic() > self._deadline_s:
            self.leave()
        return None

    def leave(self) -> None:
        """End it, without waiting for that."""
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1
            leave(self._pid)
