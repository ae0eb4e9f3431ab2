"""How far the reading of a file has come, for whoever shows it while a large one is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[float], None]

_READ = 0.95
"""Part of a file's time after which all of it is decoded: then its columns are joined and sorted."""
_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within it, ``listener`` is told which part of its file a reader in this thread has read, 0 to 1."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tell(part: float) -> None:
    """Say that so much of the file was decoded, 0 to 1."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(_READ * min(max(part, 0.0), 1.0))
