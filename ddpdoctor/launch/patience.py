"""Work on a run directory whose storage may have stopped answering: the job must not wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_LOOK_S = 0.05
_Result = TypeVar("_Result")


class NoAnswerError(OSError):
    """The storage did not answer in time."""


def bounded(
    work: Callable[[], _Result], patience_s: float, moved: Callable[[], object] = lambda: None
) -> _Result:
    """What ``work`` returns, or raises; it runs in a thread of its own, which is left behind, with NoAnswerError raised,
    once ``patience_s`` passed in which what ``moved`` returns has not changed.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ddpdoctor-run-directory", daemon=True)
    thread.start()
    seen, since_s = moved(), time.monotonic()
    while thread.is_alive():
        thread.join(_LOOK_S)
        now = moved()
        if now != seen:
            seen, since_s = now, time.monotonic()
        elif thread.is_alive() and time.monotonic() - since_s > patience_s:
            raise NoAnswerError("its storage does not answer")
    if errors:
        raise errors[0]
    return results[0]
