"""Single keys from a terminal, without Enter, while something is drawn there."""

from __future__ import annotations

import os
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from ddpdoctor.readable import is_readable


class Keys:
    """Where keys come from; nowhere where standard input is no terminal of ours."""

    def __init__(self, handle: int | None) -> None:
        self._handle = handle

    @property
    def enabled(self) -> bool:
        """Whether keys have any effect."""
        return self._handle is not None

    def wait(self, seconds: float) -> str:
        """The key pressed within that time, "" for none."""
        if self._handle is None:
            time.sleep(seconds)
            return ""
        if not is_readable(self._handle, seconds):
            return ""
        # An arrow key sends several bytes at once: no key of ours, and its letters must not count as some.
        pressed = os.read(self._handle, 64)
        if not pressed:
            self._handle = None
        return pressed.decode(errors="replace") if len(pressed) == 1 else ""


@contextmanager
def keys() -> Iterator[Keys]:
    """Keys of the terminal, which is as it was afterwards. Ctrl-C still interrupts."""
    try:
        handle = sys.stdin.fileno()
        # In the background, to change the terminal would stop this process.
        if os.tcgetpgrp(handle) != os.getpgrp():
            raise OSError
        before = termios.tcgetattr(handle)
        tty.setcbreak(handle)
    except (OSError, ValueError, AttributeError, termios.error):
        yield Keys(None)
        return
    try:
        yield Keys(handle)
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)
