"""Single key presses from the terminal, without Enter."""

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
    """Key presses from the terminal; disabled if stdin is not a terminal or this process is in the background."""

    def __init__(self, handle: int | None) -> None:
        self._handle = handle

    @property
    def enabled(self) -> bool:
        """Whether keys have any effect."""
        return self._handle is not None

    def wait(self, seconds: float) -> str:
        """The key pressed within ``seconds``; "" for none."""
        if self._handle is None:
            time.sleep(seconds)
            return ""
        if not is_readable(self._handle, seconds):
            return ""
        # An arrow key sends several bytes at once; its letters must not count as keys.
        pressed = os.read(self._handle, 64)
        if not pressed:
            self._handle = None
        return pressed.decode(errors="replace") if len(pressed) == 1 else ""


@contextmanager
def keys() -> Iterator[Keys]:
    """Reads keys within the context and restores the terminal afterwards. Ctrl-C still interrupts."""
    try:
        handle = sys.stdin.fileno()
        # A process in the background is stopped when it changes the terminal.
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
