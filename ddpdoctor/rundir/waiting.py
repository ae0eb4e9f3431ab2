"""What waits in a spool because the run directory could not take it: read from the spool, and a sentence about it."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from .compaction import stream_end_of
from .handover import DOCUMENTS
from .layout import STEPS_FILE, opened_spool
from .owned import read_file

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_POSITION_DIGITS = 18
"""More than any stream is long."""


class Waiting(NamedTuple):
    """The records in one rank's spool that are not in its run directory."""

    spool: str
    steps: int
    size: int
    """Bytes."""


def segments_in(spool: int) -> dict[str, list[tuple[int, str]]]:
    """By stream: (first byte's position, name) of the segments of a spool, in order. Raises OSError."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in os.listdir(spool):
        stream, _, position = name.rpartition(".")
        if stream and position.isdecimal() and len(position) <= _POSITION_DIGITS:
            found.setdefault(stream, []).append((int(position), name))
    for parts in found.values():
        parts.sort()
    return found


def written_part(segment: bytes) -> bytes:
    """What a rank has written to a segment: up to the first NUL, which no line holds. Later bytes may already be
    there while a line is being written."""
    return segment.partition(b"\0")[0]


def whole_lines(segment: bytes) -> bytes:
    """The same, up to its last line's end: of a line that is being written, or was when its rank was killed, nothing."""
    written = written_part(segment)
    return written[: written.rfind(b"\n") + 1]


def uncopied_bytes(spool: str, stream: str, done: int) -> bytes:
    """The bytes of a stream in a spool beyond its first ``done`` bytes; empty if a part in between is gone, because
    it was copied a moment ago, or if the spool is not this user's own."""
    try:
        with opened_spool(spool) as spool_fd:
            rest = b""
            for position, name in segments_in(spool_fd).get(stream, []):
                if position > done:
                    break
                piece = written_part(read_file(name, spool_fd, done - position))
                rest += piece
                done += len(piece)
    except OSError:
        return b""
    return rest


def waiting_in(spool: str, target: str) -> Waiting:
    """What is in ``spool`` and not in the rank's folder ``target``. Never raises."""
    steps = size = 0
    try:
        with opened_spool(spool) as spool_fd:
            streams = segments_in(spool_fd)
            size = sum(os.stat(n, dir_fd=spool_fd).st_size for n in os.listdir(spool_fd) if n in DOCUMENTS)
    except OSError:
        return Waiting(spool, 0, 0)
    for stream in streams:
        rest = uncopied_bytes(spool, stream, stream_end_of(os.path.join(target, stream)))
        size += len(rest)
        if stream == STEPS_FILE:
            steps = rest.count(b'"t":[')
    return Waiting(spool, steps, size)


def reason_of(error: OSError) -> str:
    """An error of the operating system in words."""
    return error.strerror or str(error)


def unsaved_sentence(run: str, waiting: list[Waiting], error: OSError) -> str:
    """What is not in the run directory, where it is, and what to do."""
    steps, ranks = sum(each.steps for each in waiting), len(waiting)
    what = f"{steps} recorded step{'s' if steps != 1 else ''}" if steps else "What was recorded"
    places = sorted({os.path.dirname(each.spool) for each in waiting})
    mended = "free some space for that directory" if error.errno in _NO_ROOM else "once that is fixed"
    return (
        f"{what} of {ranks} rank{'s' if ranks != 1 else ''} ({sum(each.size for each in waiting) / 1e6:.1f} MB) could not be "
        f"copied to {run} ({reason_of(error)}) and wait{'' if steps > 1 else 's'} in {', '.join(places)}, which is memory: "
        f"{mended}, then `ddpdoctor analyze {run}` fetches {'them' if steps > 1 else 'it'}."
    )
