"""Waiting for one descriptor, of any number: ``select`` takes none above 1023, and raises where a caller left more than that open."""

from __future__ import annotations

import select


def is_readable(handle: int, seconds: float) -> bool:
    """Whether there is something to read from ``handle``, or its end, within ``seconds``."""
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(max(0.0, seconds) * 1000))
