"""Whether readers of foreign data need time and memory in proportion to it: each kind of input, and one four times as long.

What is quadratic passes every limit for a small input, and takes days for the largest that is read.
"""

from __future__ import annotations

import os
import pickle
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from ddpdoctor.rundir.files import parsed
from ddpdoctor.stall.plainpickle import read_plain

TIMES = 4
MOST_TIMES = 9
"""Of the time for a quarter: a quadratic reader takes sixteen times as long, and a linear one four."""
LEAST_S = 0.3
"""Of the longer input: less is noise."""
MOST_BYTES_A_BYTE, MOST_BYTES_MORE = 300, 64 << 20
"""Memory for the longer input."""
_HEAD = b"\x80\x02"
_PRIME = (1 << 61) - 1
"""Whole numbers, and floats that equal them, hash to the rest of a division by it."""


def _keys(make: Callable[[int], bytes], count: int) -> bytes:
    return _HEAD + b"}(" + b"".join(make(number) + b"N" for number in range(count)) + b"u."


PICKLES: Mapping[str, Callable[[int], bytes]] = {
    "whole numbers with one hash": lambda n: _keys(
        lambda i: b"\x8a\x10" + (i * _PRIME + 1).to_bytes(16, "little"), n
    ),
    "whole numbers of eight bytes": lambda n: _keys(
        lambda i: b"\x8a\x08" + (i << 38).to_bytes(8, "little"), n
    ),
    "texts": lambda n: _keys(lambda i: b"\x8c\x06%06d" % i, n),
    "empty dicts": lambda n: _HEAD + b"](" + b"}" * n + b"e.",
    "tuples in tuples": lambda n: _HEAD + b")" + b"\x85" * n + b".",
    "lists in lists": lambda n: _HEAD + b"]" * n + b"a" * (n - 1) + b".",
    "marks": lambda n: _HEAD + b"(" * n + b".",
    "one list often": lambda n: pickle.dumps([[1] * n] * (n // 8), 2),
    "one text often": lambda n: pickle.dumps(["a" * n] * n, 2),
    "lists that share one": lambda n: _HEAD + b"](]q\x00" + b"]h\x00a" * n + b"e.",
}
TEXTS: Mapping[str, Callable[[int], bytes]] = {
    "empty objects": lambda n: b"[" + b",".join([b"{}"] * n) + b"]",
    "brackets": lambda n: b"[" * n + b"]" * n,
    "names": lambda n: b"{" + b",".join(b'"%d":0' % i for i in range(n)) + b"}",
    "one name": lambda n: b"{" + b",".join([b'"a":0'] * n) + b"}",
    "digits": lambda n: b"[" + b"1" * n + b"]",
    "odd numbers": lambda n: b"[" + b",".join([b"1e999"] * n) + b"]",
}


def failures(count: int = 100_000) -> Iterator[str]:
    """A sentence for each kind of input that grows faster than it should, ``count`` parts at first."""
    for read, inputs in ((read_plain, PICKLES), (parsed, TEXTS)):
        for name, make in inputs.items():
            few_s, _, _ = measured(read, make(count))
            many_s, many_bytes, length = measured(read, make(TIMES * count))
            if many_s > LEAST_S and many_s > MOST_TIMES * few_s:
                yield f"{read.__name__}, {name}: {few_s:.2f} s for a quarter, {many_s:.2f} s for the whole"
            if many_bytes > MOST_BYTES_A_BYTE * length + MOST_BYTES_MORE:
                yield f"{read.__name__}, {name}: {many_bytes >> 20} MiB of memory for {length} bytes"


def measured(read: Callable[[bytes], object], data: bytes) -> tuple[float, int, int]:
    """Processor time (s) and memory (bytes) that reading takes in a process of its own, and the length of ``data``."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            began, began_s = _most_bytes(), time.process_time()
            with suppress(ValueError):
                read(data)
            os.write(writer, f"{time.process_time() - began_s} {_most_bytes() - began}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        seconds, used = said.read().split()
    os.waitpid(child, 0)
    return float(seconds), int(used), len(data)


def _most_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
