"""Decompress while the last piece is decoded: zlib lets go of the interpreter's lock, and a core is often free."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from queue import Empty, Full, Queue
from typing import TypeVar

T = TypeVar("T")

_DEPTH = 2
"""Pieces that wait at most: enough to even out the two sides, few enough to keep memory flat."""
_POLL_S = 0.1
"""How long a side may not notice that the other has gone; nobody waits so long while both work."""
_PATIENCE_S = 1.0
"""How long a thread that is told to stop may take: longer than the decompression of a piece."""


class _End:
    """The end of the iterator, with the error that ended it."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """``items``, produced by a thread of its own.

    Its errors are raised here; leaving the loop early ends the thread.
    """
    queue: Queue[T | _End] = Queue(_DEPTH)
    stop = threading.Event()

    def put(item: T | _End) -> None:
        while not stop.is_set():
            try:
                queue.put(item, timeout=_POLL_S)
                return
            except Full:
                continue

    def produce() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                put(item)
                if stop.is_set():
                    return
        except BaseException as raised:  # handed over to the consumer, whatever it is
            error = raised
        put(_End(error))

    thread = threading.Thread(target=produce, name="ddpdoctor-decompress", daemon=True)
    thread.start()
    try:
        while True:
            try:
                item = queue.get(timeout=_POLL_S)
            except Empty:
                continue
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        stop.set()
        thread.join(timeout=_PATIENCE_S)  # it may hang in a read from a pipe or a network
