"""Standard streams as a caller may leave them to a command: closed, gone, or of a narrow encoding."""

from __future__ import annotations

import io
import os
import sys


def prepare_streams() -> None:
    """Where the caller closed a stream, words go nowhere; a letter that a stream's encoding lacks becomes a mark."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # Takes this number, the lowest free one, lest a file of ours does. The job finds it closed.
            os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # Not inherited: a job finds the stream as closed as its caller left it.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def flush_stdout(code: int) -> int:
    """``code``, once nothing is left to write: a reader that has gone (``| head``) is no error to report."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass
    return code
