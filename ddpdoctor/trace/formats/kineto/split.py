"""Where one event ends and the next begins, in a buffer that holds part of the "traceEvents" array."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_BETWEEN = re.compile(rb"\}\s*,\s*\Z")
_BEFORE_CLOSE = re.compile(rb"[}\[,]\s*\Z")
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[{}\[\]]', re.DOTALL)
"""A string, also one that does not end, or a bracket. Nothing is looked at twice: a string may be all there is."""
_NEXT_EVENT = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid)"\s*:)')
LAYOUT_BYTES = 200
"""Bytes of blanks between two events that are looked at; Kineto writes four."""
_DEEPEST = 1_000
"""Brackets within brackets: an event has four, and nothing decodes so many."""
_LOOKED_AT = 10_000
"""Brackets that are looked at for the end of an event; where they are all nested, the exact scan finds it."""


class Scan(NamedTuple):
    """What an exact scan found: ``spans`` of whole objects, and the index of the array's closing bracket, else -1."""

    spans: list[tuple[int, int]]
    closed_at: int


def boundaries(buffer: bytes | bytearray) -> Iterator[int]:
    """Candidates for the comma between two events, the last first.

    A wrong one (inside of a nested list or of a string) leaves brackets or quotes open, so the text before it does not
    decode: try it, and take the next.
    """
    position = len(buffer)
    for _ in range(_LOOKED_AT):
        if (position := buffer.rfind(b"{", 0, position)) <= 0:
            return
        window = buffer[max(0, position - LAYOUT_BYTES) : position]
        if match := _BETWEEN.search(window):
            yield position - len(window) + window.index(b",", match.start())


def closings(buffer: bytes | bytearray) -> Iterator[int]:
    """Candidates for the bracket that closes the array, the last first; to be tried in the same way."""
    position = len(buffer)
    for _ in range(_LOOKED_AT):
        if (position := buffer.rfind(b"]", 0, position)) < 0:
            return
        window = buffer[max(0, position - LAYOUT_BYTES) : position]
        if not window.strip() or _BEFORE_CLOSE.search(window):
            yield position


def scan(buffer: bytes) -> Scan:
    """All whole events at the head of ``buffer``, by counting brackets outside of strings: slow and certain."""
    spans: list[tuple[int, int]] = []
    depth = begin = 0
    for match in _TOKEN.finditer(buffer):
        token = buffer[match.start()]
        if token in b"{[":
            if depth == 0:
                begin = match.start()
            depth += 1
            if depth > _DEEPEST:
                break
        elif token in b"}]":
            depth -= 1
            if depth < 0:
                return Scan(spans, match.start())
            if depth == 0 and token == 0x7D:
                spans.append((begin, match.end()))
    return Scan(spans, -1)


def resume(buffer: bytes) -> int:
    """Start of the next thing that looks like an event, after one whose quotes or brackets do not close; -1 if none."""
    match = _NEXT_EVENT.search(buffer, 1)
    return match.end() if match else -1
