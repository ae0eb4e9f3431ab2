"""Waits for a file descriptor with ``poll``, because ``select`` fails for descriptors above 1023."""

from __future__ import annotations

import select


def is_readable(handle: int, seconds: float) -> bool:
    """Whether ``handle`` has data or is at its end within ``seconds``."""
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(max(0.0, seconds) * 1000))
