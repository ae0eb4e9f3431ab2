"""Parts of a stream that were lost on their way: whoever copies says so in their place, and goes on behind them.

A stream's position in the run directory is the file's size there (and what thinning took away). So a gap is filled, or what follows
would be copied again and again.
"""

from __future__ import annotations

import json
import os
import re

from .compaction import thinned_head
from .layout import STEPS_FILE
from .stepevents import LineField

_STEP = re.compile(rb'^\{"step": ?(\d{1,16})[,}]', re.MULTILINE)
_TAIL_BYTES = 64 * 1024
_LINE_BYTES = 64 * 1024
_MOST_FILLED_BYTES = 1024 * 1024
_WHY = "their memory was removed before it was copied, as cleaners of /dev/shm do, or systemd at a logout (RemoveIPC)"


def bridge(out: int, stream: str, done: int, position: int, data: bytes) -> bytes:
    """What is written to the open file ``out`` from the stream's position ``done`` on, so that ``data`` follows at its own
    ``position``. Raises OSError."""
    words = _lost_steps(out, data) if stream == STEPS_FILE else ""
    forms = [f"{words}: {_WHY}.", f"{words}."] if words else []
    filled, missing = b"", position - done
    if not done and missing > _MOST_FILLED_BYTES:
        # Somebody has removed the log itself, and it may have been long.
        missing = len(_note(forms[0] if forms else "", 0))
        filled = thinned_head(position - missing)
    while missing > 2 * _LINE_BYTES:
        filled, missing = filled + _note("", _LINE_BYTES), missing - _LINE_BYTES
    fits = next((each for each in (*forms, "") if len(_note(each, 0)) <= missing), None)
    return filled + (b"\n" * missing if fits is None else _note(fits, missing))


def _note(words: str, size: int) -> bytes:
    """A line of ``size`` bytes, or as many as it takes."""
    line = f"{{{LineField.NOTE.key}{json.dumps(words)}".encode()
    return line + b" " * (size - len(line) - 2) + b"}\n"


def _lost_steps(out: int, data: bytes) -> str:
    """Those between what is in the open file and what follows, in words; "" for none."""
    size = os.fstat(out).st_size
    before = _STEP.findall(os.pread(out, _TAIL_BYTES, max(0, size - _TAIL_BYTES)))
    after = _STEP.search(data)
    first, last = int(before[-1]) + 1 if before else 0, int(after[1]) - 1 if after else -1
    if after is None:
        return f"Steps from {first} on were lost"
    if first > last:
        return ""
    return f"Step {first} was lost" if first == last else f"Steps {first} to {last} were lost"
