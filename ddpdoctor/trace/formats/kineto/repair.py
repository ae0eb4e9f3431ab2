"""What Kineto has been known to write that is not JSON, put right.

NaN and Infinity, raw backslashes, control characters, broken UTF-8, a comma after the last event.
"""

from __future__ import annotations

import re

_NUMBER = rb"[-+]?(?:nan|NaN|inf|Inf|infinity|Infinity)\b"
_VALUE = re.compile(rb'(":\s*)' + _NUMBER)
_IN_LIST = re.compile(rb"([\[,]\s*)" + _NUMBER + rb"(?=\s*[,\]])")
_BACKSLASH = re.compile(rb'((?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))++)|\\')
_TRAILING_COMMA = re.compile(rb",(\s*[}\]])")
_BLANKS = bytes(b if b >= 0x20 or b in (0x0A, 0x0D, 0x09) else 0x20 for b in range(256))
"""Each byte as itself, control characters but for line ends and tabs as blanks."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def repair(text: bytes | bytearray) -> bytes:
    """``text`` with the usual faults replaced (by null, an escaped backslash, a blank, U+FFFD), if there are any.

    Made for whole batches: quick, and only for text that does not decode as it is.
    """
    mended = _VALUE.sub(rb"\1null", bytes(text))
    if b"\\" in mended:
        mended = _BACKSLASH.sub(lambda m: m.group(0) if m.group(1) else rb"\\", mended)
    mended = mended.translate(_BLANKS)
    try:
        mended.decode("utf-8")
    except UnicodeDecodeError:
        mended = mended.decode("utf-8", "replace").encode()
    return mended


def repair_event(text: bytes) -> bytes:
    """A single event or the keys around the events, repaired with all that is known."""
    mended = _IN_LIST.sub(rb"\1null", repair(text))
    mended = _STRING.sub(
        lambda m: m.group(0).translate(_BLANKS).replace(b"\n", b" ").replace(b"\t", b" "), mended
    )
    return _TRAILING_COMMA.sub(rb"\1", mended.replace(b"\r", b" "))
