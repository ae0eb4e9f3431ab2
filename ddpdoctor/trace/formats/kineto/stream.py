"""Decodes the events of a Chrome trace in batches. Of a truncated or damaged file, the intact events are decoded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.sources import Source, prefetch, report_progress

NOTHING = msgspec.Raw(b"")


class Arguments(msgspec.Struct, gc=False):
    """The "args" object of an event."""

    external_id: Any = msgspec.field(default=-1, name="External id")
    correlation: Any = -1
    device: Any = -1
    stream: Any = -1
    bytes: Any = -1
    dims: msgspec.Raw = msgspec.field(default=NOTHING, name="Input Dims")
    operation: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_size: Any = msgspec.field(default=None, name="Group size")
    sequence: Any = msgspec.field(default=None, name="Seq")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    name: Any = None
    old_external_id: Any = msgspec.field(default=-1, name="external id")
    old_dims: msgspec.Raw = msgspec.field(default=NOTHING, name="Input dims")


class Event(msgspec.Struct, gc=False):
    """One element of "traceEvents"; ``ts`` and ``dur`` in µs."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = 0
    args: Arguments | None = None


class ExactEvent(Event, gc=False):
    """An event with ``ts`` as text: a double cannot represent µs since 1970 to the nanosecond."""

    ts: msgspec.Raw = msgspec.Raw(b"null")


NO_ARGUMENTS = Arguments()
EVENTS = msgspec.json.Decoder(list[Event])
EXACT_EVENTS = msgspec.json.Decoder(list[ExactEvent])
_NUMBER = rb"[-+]?(?:nan|NaN|inf|Inf|infinity|Infinity)\b"
_VALUE = re.compile(rb'(":\s*)' + _NUMBER)
_IN_LIST = re.compile(rb"([\[,]\s*)" + _NUMBER + rb"(?=\s*[,\]])")
_BACKSLASH = re.compile(rb'((?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))++)|\\')
_TRAILING_COMMA = re.compile(rb",(\s*[}\]])")
_BLANKS = bytes(b if b >= 0x20 or b in (0x0A, 0x0D, 0x09) else 0x20 for b in range(256))
"""Translation table that replaces control characters by blanks, except line ends and tabs."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def repair(text: bytes | bytearray) -> bytes:
    """``text`` with common errors replaced: NaN by null, raw backslashes by escaped ones, control characters by blanks, invalid
    UTF-8 by U+FFFD.

    Fast enough for whole batches. Used if they cannot be decoded unchanged.
    """
    repaired_text = _VALUE.sub(rb"\1null", bytes(text))
    if b"\\" in repaired_text:
        repaired_text = _BACKSLASH.sub(lambda m: m.group(0) if m.group(1) else rb"\\", repaired_text)
    repaired_text = repaired_text.translate(_BLANKS)
    try:
        repaired_text.decode("utf-8")
    except UnicodeDecodeError:
        repaired_text = repaired_text.decode("utf-8", "replace").encode()
    return repaired_text


def repair_event(text: bytes) -> bytes:
    """``text`` (a single event, or the keys around the events) with all known repairs, which are too slow for whole batches."""
    repaired_text = _IN_LIST.sub(rb"\1null", repair(text))
    repaired_text = _STRING.sub(
        lambda m: m.group(0).translate(_BLANKS).replace(b"\n", b" ").replace(b"\t", b" "), repaired_text
    )
    return _TRAILING_COMMA.sub(rb"\1", repaired_text.replace(b"\r", b" "))


_BETWEEN = re.compile(rb"\}\s*,\s*\Z")
_BEFORE_CLOSE = re.compile(rb"[}\[,]\s*\Z")
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[{}\[\]]', re.DOTALL)
"""A string, possibly unterminated, or a bracket. Possessive, so that it never backtracks in a long string."""
_NEXT_EVENT = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid)"\s*:)')
LAYOUT_BYTES = 200
"""Longest white space between two events; Kineto writes four bytes."""
_MAX_DEPTH = 1_000
"""Deepest accepted nesting of brackets; an event has four levels, and no decoder accepts this many."""
_MAX_BRACKETS = 10_000
"""Number of brackets that are tried as the end of an event before the exact scan."""


class Scan(NamedTuple):
    """Result of an exact scan: ``spans`` (start, end) of complete objects, and the index of the array's closing bracket or -1."""

    spans: list[tuple[int, int]]
    closed_at: int


def boundaries(buffer: bytes | bytearray) -> Iterator[int]:
    """Yields candidates for the comma between two events, from the last to the first.

    The text before a wrong candidate, inside a nested list or a string, has open brackets or quotes, so it cannot be decoded and the
    caller tries the next candidate.
    """
    position = len(buffer)
    for _ in range(_MAX_BRACKETS):
        if (position := buffer.rfind(b"{", 0, position)) <= 0:
            return
        window = buffer[max(0, position - LAYOUT_BYTES) : position]
        if match := _BETWEEN.search(window):
            yield position - len(window) + window.index(b",", match.start())


def closings(buffer: bytes | bytearray) -> Iterator[int]:
    """Yields candidates for the bracket that closes the array, from the last to the first. See :func:`boundaries`."""
    position = len(buffer)
    for _ in range(_MAX_BRACKETS):
        if (position := buffer.rfind(b"]", 0, position)) < 0:
            return
        window = buffer[max(0, position - LAYOUT_BYTES) : position]
        if not window.strip() or _BEFORE_CLOSE.search(window):
            yield position


def scan(buffer: bytes) -> Scan:
    """Finds all complete events at the start of ``buffer`` by counting brackets outside of strings. Slow but exact."""
    spans: list[tuple[int, int]] = []
    depth = begin = 0
    for match in _TOKEN.finditer(buffer):
        token = buffer[match.start()]
        if token in b"{[":
            if depth == 0:
                begin = match.start()
            depth += 1
            if depth > _MAX_DEPTH:
                break
        elif token in b"}]":
            depth -= 1
            if depth < 0:
                return Scan(spans, match.start())
            if depth == 0 and token == 0x7D:
                spans.append((begin, match.end()))
    return Scan(spans, -1)


def resume(buffer: bytes) -> int:
    """Index of the next text that looks like an event, after an event with unclosed quotes or brackets; -1 if there is none."""
    match = _NEXT_EVENT.search(buffer, 1)
    return match.end() if match else -1


Batch = list[Event] | list[ExactEvent]

_KEY = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')
_BOM = b"\xef\xbb\xbf"
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""RecursionError: the nesting is deeper than the decoder's limit."""
_MAX_TRIES = 4
"""Number of boundaries that are tried before the exact scan. The first is correct in every trace that Kineto writes."""
_CLOSING = ord("]")
_AFTER_LIST = re.compile(rb"\s*(?:[,}\0]|\Z)")
_MAX_DAMAGES = 100
"""After this many damaged places, the rest of a file is not read."""
_MAX_LOST_EVENTS = 20_000
"""After this many malformed events, the rest of a file is not read: each takes as long as a hundred valid ones."""
MAX_EVENT_BYTES = 4 << 20
"""Longer events are skipped. An event with a Python stack has some hundred kilobytes."""
_MAX_BYTES_WITHOUT_EVENT = 64 << 20
"""Reading stops if the text before the events, or any text without an event, is longer."""
_MAX_TOP_BYTES = 8 << 20
"""Longest text before or after the events that is decoded: a few keys in most traces, some megabytes with thousands of ranks and many
process groups. The decoded objects take many times this size."""


def _open_list(*texts: bytes) -> bytearray:
    """``[`` followed by the joined texts."""
    buffer = bytearray(b"[")
    for text in texts:
        buffer += text
    return buffer


class EventStream:
    """Decodes one :class:`Source`. Iterate :meth:`batches` to the end, then read ``top`` and ``truncated``."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.exact = False
        """Whether times are now decoded as text, see :meth:`decode_with_exact_times`."""
        self.top: dict[str, Any] = {}
        """Top-level keys except "traceEvents"."""
        self.top_unread = False
        """Whether the text before the events is too long to be decoded."""
        self.tail_unread = False
        """Whether the text after the events is too long to be decoded."""
        self.truncated = False
        self.lost_events = 0
        self.damages = 0
        """Number of places at which text that is not an event was skipped."""
        self.oversized = 0
        """Number of these places at which the text was too long for an event."""
        self.too_deep = False
        """Whether text was nested too deeply to be decoded."""
        self.repaired = False
        self._head = self._tail = b""
        self._closed = self._bare_list = False
        self._in_oversized_event = False
        """Whether the buffer begins inside text that is too long for an event."""
        self._bytes_without_event = 0
        """Length of the text since the last event."""
        self._text: bytes | memoryview = b""
        """Text of the latest batch, for :meth:`decode_with_exact_times`."""

    def batches(self) -> Iterator[Batch]:
        """Yields lists of events in file order. Raises :class:`UnusableInput` if the content is not a trace."""
        with closing(prefetch(self.source.pieces())) as pieces:
            rest, enough_bytes = self._find_events(pieces), 0
            for piece in pieces:
                report_progress(self.source.fraction_read)
                if self._closed:
                    self._tail += piece
                    if len(self._tail) > _MAX_TOP_BYTES:
                        break
                    continue
                buffer = _open_list(rest, piece)
                if len(buffer) < enough_bytes:
                    rest = bytes(memoryview(buffer)[1:])
                    continue
                batch, rest = self._decode_next(buffer)
                if batch:
                    yield batch
                    self._bytes_without_event = 0
                if self._too_damaged(0 if batch else len(buffer)):
                    break
                # An event that is longer than a piece is not scanned again for each piece.
                enough_bytes = 0 if batch else 2 * len(rest)
        if not self._closed:
            yield from self._last_batches(_open_list(rest))
        self.truncated = self.truncated or self.source.read_error is not None
        self._read_top()

    def decode_with_exact_times(self) -> list[ExactEvent]:
        """Decodes the latest batch again with times as text, as well as all later batches."""
        self.exact = True
        return EXACT_EVENTS.decode(self._text)

    def _too_damaged(self, bytes_without_event: int) -> bool:
        """Whether the file is so damaged that the rest is not read. If so, sets the source's ``read_error``."""
        self._bytes_without_event += bytes_without_event
        if self._bytes_without_event > _MAX_BYTES_WITHOUT_EVENT:
            why = f"holds {self._bytes_without_event >> 20} MiB in one go that are no events"
        elif self.damages >= _MAX_DAMAGES or self.lost_events >= _MAX_LOST_EVENTS:
            why = "is damaged in too many places"
        else:
            return False
        self.source.read_error = self.source.read_error or why
        return True

    def _find_events(self, pieces: Iterable[bytes]) -> bytes:
        """Reads up to the array's opening bracket and returns the text after it."""
        buffer, searched = b"", 0
        for piece in pieces:
            buffer += piece
            start = buffer.lstrip(_BOM + b" \t\r\n")
            if start.startswith(b"["):
                self._bare_list = True
                return start[1:]
            if start and not start.startswith(b"{"):
                raise UnusableInput(
                    f"{self.source.path} is not a profiler trace: it does not begin like JSON."
                )
            if match := _KEY.search(buffer, max(0, searched - 64)):
                self._head = buffer[: match.start()]
                return buffer[match.end() :]
            searched = len(buffer)
            if searched > _MAX_BYTES_WITHOUT_EVENT:
                break
        why = f"it {self.source.read_error}" if self.source.read_error else 'it has no list "traceEvents"'
        raise UnusableInput(f"{self.source.path} holds no profiler events: {why}.")

    def _decode_up_to(self, buffer: bytearray, end: int) -> Batch | None:
        """Decodes the events of ``buffer`` before ``end``, the index of the comma or bracket after an event; None if that fails.

        Overwrites that character with the closing bracket, because copying the text takes a third of the time of decoding it.
        """
        before = buffer[end]
        buffer[end] = _CLOSING
        self._text = memoryview(buffer)[: end + 1]
        try:
            return EXACT_EVENTS.decode(self._text) if self.exact else EVENTS.decode(self._text)
        except _UNDECODABLE as error:
            self.too_deep = self.too_deep or isinstance(error, RecursionError)
            buffer[end] = before
            return None

    def _decode(self, text: bytes) -> Batch | None:
        return self._decode_up_to(_open_list(text, b"]"), len(text) + 1)

    def _decode_next(self, buffer: bytearray) -> tuple[Batch | None, bytes]:
        """(Batch of the complete events in ``buffer``, rest of the text)."""
        if self._in_oversized_event:
            return None, self._skip_broken(bytes(buffer[1:]))
        text = bytearray(repair(buffer)) if self.repaired else buffer
        for _ in range(2):
            for cut in islice(boundaries(text), _MAX_TRIES):
                if (batch := self._decode_up_to(text, cut)) is not None:
                    return batch, bytes(memoryview(text)[cut + 1 :])
            if not self._repair_helps(text):
                break
            text = bytearray(repair(text))
        return self._decode_by_scan(bytes(text[1:]))

    def _repair_helps(self, buffer: bytes | bytearray) -> bool:
        """Whether :func:`repair` changes this text. If so, all later text is repaired before it is decoded."""
        if self.repaired or repair(buffer) == buffer:
            return False
        self.repaired = True
        return True

    def _last_batches(self, buffer: bytearray) -> Iterator[Batch]:
        """Yields the events at the end of the file, in several batches if text between them is damaged."""
        batch, rest = self._decode_last(buffer)
        if batch:
            yield batch
        while not self._closed and not self._too_damaged(len(rest)) and (start := resume(rest)) >= 0:
            self.damages += 1
            batch, rest = self._decode_by_scan(rest[start:])
            if batch:
                yield batch
        if not self._closed:
            unfinished = rest.strip(b" \t\r\n,")
            self.truncated = bool(unfinished) or not self._bare_list

    def _decode_last(self, buffer: bytearray) -> tuple[Batch | None, bytes]:
        """(Batch at the end of the file, rest of the text).

        Also finds the array's closing bracket and the text after it.
        """
        text = bytearray(repair(buffer)) if self.repaired else buffer
        for end in islice(closings(text), 2 * _MAX_TRIES):
            # A bracket inside damaged text is not the end of the array.
            if not _AFTER_LIST.match(text, end + 1):
                continue
            if (batch := self._decode_up_to(text, end)) is not None:
                self._closed, self._tail = True, bytes(memoryview(text)[end + 1 :])
                return batch, b""
        return self._decode_by_scan(bytes(text[1:]))

    def _decode_by_scan(self, buffer: bytes) -> tuple[Batch | None, bytes]:
        """Like :meth:`_decode_next`, but uses the exact scan, which finds the array's end and skips malformed events."""
        spans, closed_at = scan(buffer)
        events = buffer
        if closed_at >= 0 and _AFTER_LIST.match(buffer, closed_at + 1):
            self._closed, self._tail = True, buffer[closed_at + 1 :]
            events = buffer[:closed_at]
        if not spans:
            return None, self._skip_broken(events)
        text = events[spans[0][0] : spans[-1][1]]
        batch = self._decode(text)
        if batch is None and self._repair_helps(text):
            batch = self._decode(repair(text))
        if batch is None:
            batch = self._one_by_one(events[begin:end] for begin, end in spans)
        rest = events[spans[-1][1] :].lstrip(b" \t\r\n").removeprefix(b",")
        return batch, rest

    def _one_by_one(self, texts: Iterable[bytes]) -> Batch:
        """The events that can be decoded. Counts the others in ``lost_events``."""
        good = []
        for text in texts:
            if self._decode(text) is None:
                text, self.repaired = repair_event(text), True
                if self._decode(text) is None:
                    self.lost_events += 1
                    if self.lost_events >= _MAX_LOST_EVENTS:
                        break
                    continue
            good.append(text)
        return self._decode(b",".join(good)) or []

    def _skip_broken(self, buffer: bytes) -> bytes:
        """Skips an event that does not end within :data:`MAX_EVENT_BYTES`. Returns the rest of the text."""
        if not self._in_oversized_event:
            if len(buffer) < MAX_EVENT_BYTES:
                return buffer
            self.damages += 1
        start = resume(buffer)
        if start < 0:
            self.oversized += not self._in_oversized_event
            self._in_oversized_event = True
            return buffer[-LAYOUT_BYTES:]
        self._in_oversized_event = False
        return buffer[start:]

    def _read_top(self) -> None:
        """Decodes the top-level keys before and after the events, or only those before if the others are damaged."""
        self.top_unread = len(self._head) > _MAX_TOP_BYTES
        self.tail_unread = len(self._tail) > _MAX_TOP_BYTES
        if self._bare_list or self.top_unread:
            return
        head = self._head.lstrip(_BOM).rstrip(b" \t\r\n,") + (b"," if b'"' in self._head else b"")
        for text in (head + b'"":0' + self._tail, head + b'"":0}'):
            for convert in (bytes, repair_event):
                try:
                    top = msgspec.json.decode(convert(text))
                except _UNDECODABLE:
                    continue
                if isinstance(top, dict):
                    self.top = {k: v for k, v in top.items() if k}
                    return
