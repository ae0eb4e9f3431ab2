"""What a process of ddpdoctor asks of its system: standard streams that may be closed, without a reader, or with a limited encoding;
whether a file descriptor is readable; a signal when its parent dies, see prctl(2), so that a killed launcher leaves no processes."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2
"""From <linux/prctl.h>."""


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


def die_with_parent(number: int, libc: ctypes.CDLL | None = None) -> None:
    """Make the kernel send this process the signal ``number`` when its parent dies. ``libc``: an already loaded libc, for use directly
    after fork, when no library should be loaded."""
    if libc is None:
        import ctypes

        libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
