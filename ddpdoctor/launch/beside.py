"""A process beside the launcher, in which something can be done that the launcher must never wait for."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from ddpdoctor.launch.patience import LOOK_S, Patience, hold_no_streams, leave
from ddpdoctor.readable import is_readable

IN_ORDER = b"."
"""Sent by a launcher whose job has ended; one that was killed sends nothing."""
_ANSWER_BYTES = 1 << 16
_UNHEARD_S = 5.0
"""For the end of one that could not be listened to."""
_NICENESS = 5
"""The job's own processes come first where processors are short."""

Work = Callable[[int, int], None]
"""Done in the process, with the open files by which the launcher says that the job has ended, and by which it is answered."""


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
        ends = list(os.pipe())
        try:
            ends += os.pipe()
            pid = os.fork()
        except OSError:
            for end in ends:
                os.close(end)
            raise
        orders, self._orders, self._answers, writer = ends
        if pid == 0:
            _live(self._work, orders, writer)
        self._pid = pid
        os.close(orders)
        os.close(writer)

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


def _live(work: Work, orders: int, writer: int) -> NoReturn:
    try:
        # Whoever signals a whole group, as a terminal does, means the job.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        hold_no_streams([orders, writer])
        os.nice(_NICENESS)
        work(orders, writer)
    finally:
        os._exit(0)


def say(writer: int, **what: Any) -> None:
    """Tell the launcher; nobody listens where it is gone."""
    try:
        os.write(writer, json.dumps(what).encode() + b"\n")
    except OSError:
        pass


def is_told_to_end(orders: int, patience_s: float) -> bool:
    """Whether the launcher has said that its job has ended, or is gone."""
    return is_readable(orders, patience_s)
