"""Exceptions that are not ours: Python runs the job's signal handlers between any two steps of the main thread, also of our code.

A DataLoader's handler of SIGCHLD raises where a worker was killed, one of SIGALRM where something takes too long: to swallow that
would change what the job does.
"""

from __future__ import annotations

import signal
import threading
from types import CodeType, TracebackType
from typing import Any


def is_the_jobs(error: BaseException) -> bool:
    """Whether a signal handler raised ``error``; its traceback then begins there, without our lines."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = _handlers()
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            error.__traceback__ = trace
            return True
        trace = trace.tb_next
    return False


def _handlers() -> set[CodeType]:
    """The code of all handlers of this process."""
    codes = set()
    for number in signal.valid_signals():
        code = _code_of(signal.getsignal(number))
        if code is not None:
            codes.add(code)
    return codes


def _code_of(handler: Any) -> CodeType | None:
    """Of a function, a method, a partial, or an object that is called."""
    for _ in range(4):
        code = getattr(handler, "__code__", None)
        if isinstance(code, CodeType):
            return code
        inner = getattr(handler, "__func__", None) or getattr(handler, "func", None)
        handler = inner if inner is not None else getattr(type(handler), "__call__", None)
    return None
