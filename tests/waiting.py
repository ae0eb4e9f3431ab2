"""Waits for other processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(found: Callable[[], T], process: subprocess.Popen[str] | None = None, within_s: float = 90.0) -> T:
    """The first true result of ``found``. Fails after ``within_s``, or, with the output of ``process``, when ``process`` ends."""
    deadline_s = time.monotonic() + within_s
    while not (value := found()):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s, f"it did not come within {within_s:g} s"
        time.sleep(0.05)
    return value
