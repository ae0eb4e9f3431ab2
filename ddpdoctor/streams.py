"""Handles standard streams that are closed, have no reader, or have a limited encoding; waits for a file descriptor."""

from __future__ import annotations

import io
import os
import select
import sys


def prepare_streams() -> None:
    """Redirect closed standard streams to /dev/null, and make streams replace characters that their encoding lacks."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # Occupies this descriptor, the lowest free one, so that no other file gets it. The job does not inherit it.
            os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # Not inherited: the job's stream stays closed, as the caller left it.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def flush_stdout(code: int) -> int:
    """Flush standard output and return ``code``. A closed pipe (``| head``) is not an error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass
    return code


def is_readable(handle: int, seconds: float) -> bool:
    """Whether ``handle`` has data or is at its end within ``seconds``. With ``poll``, because ``select`` fails for descriptors above
    1023."""
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(max(0.0, seconds) * 1000))
