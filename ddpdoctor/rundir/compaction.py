"""Keeps the step log of a long job within a budget on disk, while the job runs.

A log that exceeds the budget is thinned: the first and the newest steps are kept, and between them every second, fourth,
eighth ... block of successive steps. The choice depends only on step numbers, so ranks whose logs are thinned at different
times still share steps. Lines that belong to no step are kept.

The log is rewritten to a temporary file, which replaces it. Its second line holds the number of bytes of the stream that it
lacks, so that copying from the spool continues at the right position. The third line lists the steps that were left out:

    {"thinned":{"shift":bytes,"every":8}}
    {"left_out":[[first,last],...]}
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Callable

from .files import reading
from .layout import STEPS_FILE, STEPS_SCHEMA
from .owned import open_file

MOST_RANK_BYTES = 64 * 1024 * 1024
"""Upper limit of the bytes of one rank's log: some 160,000 steps."""
MOST_RUN_BYTES = 4 * 1024 * 1024 * 1024
LEAST_RANK_BYTES = 4 * 1024 * 1024
"""Bytes of one rank's log that are always allowed, whatever the number of ranks."""
BLOCK_STEPS = 512
"""Successive steps that are kept or removed together. The hook records the first steps of each block in full, however much it
thins."""
_FIRST_SHARE, _NEWEST_SHARE = 1 / 8, 1 / 4
_KEPT_SHARE = 0.7
"""Share of the budget that is used after thinning, so that thinning is rare."""
_PIECE_BYTES = 64 * 1024
_REST_S = 0.002
"""Seconds between two pieces, so that this thread does not hold the GIL all the time."""
_TEMPORARY = STEPS_FILE + ".thin.tmp"
_HEAD_BYTES = 4096
_LONGEST_LEFT_OUT = 4 * 1024 * 1024
_MOST_SHIFT = 2**53
_MOST_EVERY = 2**44

STEP_LINE = re.compile(rb'\{"(step|device)": ?(\d{1,16})[,}]')
"""Beginning of the line of a step, or of its device times."""
STEP_LINES = re.compile(rb'^\{"step": ?(\d{1,15})[,}]', re.MULTILINE)
"""Beginnings of the lines of steps."""
_TAIL_BYTES = (64 * 1024, 4 * 1024 * 1024)
"""Bytes at the end of a log in which its last step is searched for: usual lines, and the longest."""

Ranges = list[tuple[int, int]]
"""(first, last) of consecutive numbers; sorted, and not adjacent to each other."""


def rank_budget(world_size: int) -> int:
    """Upper limit of the bytes on disk of the step log of each of ``world_size`` ranks."""
    return max(LEAST_RANK_BYTES, min(MOST_RANK_BYTES, MOST_RUN_BYTES // max(world_size, 1)))


def union(parts: Iterable[Ranges]) -> Ranges:
    """The numbers that are in any of ``parts``, whose ranges may be in any order."""
    joined: Ranges = []
    for first, last in sorted(pair for part in parts for pair in part):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


def stream_end(handle: int) -> int:
    """Position in the stream of the end of the open file ``handle``: its size plus the bytes removed by thinning. Raises OSError."""
    return os.fstat(handle).st_size + stream_shift(handle)


def stream_end_of(path: str) -> int:
    """Like ``stream_end``, for the file at ``path``; 0 if it is missing or cannot be read."""
    try:
        with reading(path) as source:
            return stream_end(source.fileno())
    except OSError:
        return 0


def last_step(handle: int) -> int | None:
    """The number of the last step in an open log; None if there is none near its end. Raises OSError."""
    size = os.fstat(handle).st_size
    for tail in _TAIL_BYTES:
        if found := STEP_LINES.findall(os.pread(handle, tail, max(0, size - tail))):
            return int(found[-1])
        if tail >= size:
            break
    return None


def stream_shift(handle: int) -> int:
    """Difference between a position in the stream and that in the open file ``handle``, bytes. Raises OSError."""
    return int(_head(handle).get("shift", 0))


def _head(handle: int) -> dict[str, int]:
    """The content of the second line; {} if the file was not thinned. Raises OSError."""
    lines = os.pread(handle, _HEAD_BYTES, 0).split(b"\n", 2)
    if len(lines) < 3 or not lines[1].startswith(b'{"thinned":'):
        return {}
    try:
        found = json.loads(lines[1])["thinned"]
        shift, every = found["shift"], found["every"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    if type(shift) is not int or type(every) is not int:
        return {}
    valid = 0 <= shift < _MOST_SHIFT and 1 <= every <= _MOST_EVERY and every & (every - 1) == 0
    return {"shift": shift, "every": every} if valid else {}


def thinned_steps(folder: str) -> Ranges:
    """Numbers of the steps removed by thinning from a rank's log; [] if none were, or the log cannot be read."""
    try:
        with reading(os.path.join(folder, STEPS_FILE)) as source:
            return _left_out(source.fileno())
    except OSError:
        return []


def _left_out(handle: int) -> Ranges:
    if not _head(handle):
        return []
    lines = os.pread(handle, _HEAD_BYTES + _LONGEST_LEFT_OUT, 0).split(b"\n", 3)
    try:
        pairs = json.loads(lines[2])["left_out"]
        numbers = [(first, last) for first, last in pairs if type(first) is type(last) is int]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return []
    return union([[pair for pair in numbers if 0 <= pair[0] <= pair[1] < _MOST_SHIFT]])


class DiskBudget:
    """Disk budget of one rank's step log. Only for the process that holds the lock of its spool."""

    def __init__(self, most_bytes: int, go_on: Callable[[], bool] = lambda: True) -> None:
        """``go_on`` is called repeatedly during thinning; if it returns False, thinning is abandoned and the log is unchanged."""
        self._most_bytes, self._go_on = most_bytes, go_on
        self._next_thinning_bytes = most_bytes

    def keep(self, rank_fd: int) -> None:
        """Thin the log in a rank's open folder if it is too large. Never raises: a log that cannot be thinned is unchanged."""
        try:
            if os.stat(STEPS_FILE, dir_fd=rank_fd).st_size <= self._next_thinning_bytes:
                return
        except OSError:
            return
        self._next_thinning_bytes += self._most_bytes // 8
        with suppress(OSError):
            thin(rank_fd, self._most_bytes, self._go_on)
            # If it could not be thinned, try again after it has grown by as much again.
            self._next_thinning_bytes = max(
                self._most_bytes, os.stat(STEPS_FILE, dir_fd=rank_fd).st_size + self._most_bytes // 8
            )


class _Piece:
    """Successive lines of a log that are kept or removed together."""

    __slots__ = ("block", "end", "numbers", "start")

    def __init__(self, start: int, block: int | None) -> None:
        self.start = self.end = start
        self.block = block
        """None for lines that are always kept."""
        self.numbers: Ranges = []
        """Numbers of the steps in it."""

    def add(self, size: int, step: int | None) -> None:
        self.end += size
        if step is None:
            return
        if self.numbers and step == self.numbers[-1][1] + 1:
            self.numbers[-1] = (self.numbers[-1][0], step)
        else:
            self.numbers.append((step, step))


def thin(rank_fd: int, most_bytes: int, go_on: Callable[[], bool] = lambda: True) -> bool:
    """Thin the step log in a rank's open folder to about two thirds of ``most_bytes``. Returns False if it is unchanged.

    Nothing may be appended meanwhile. A process that has the file open continues to read the old one. Raises OSError; the log is
    then unchanged.
    """
    handle = open_file(STEPS_FILE, rank_fd, os.O_RDONLY)
    try:
        size, head = os.fstat(handle).st_size, _head(handle)
        first, begin = _first_lines(handle, 3 if head else 1)
        pieces = _pieces(handle, begin, size, most_bytes, go_on)
        if pieces is None:
            return False
        every = _block_interval(pieces, head.get("every", 1), most_bytes)
        kept = [piece for piece in pieces if _is_kept(piece, every)]
        gone = [piece.numbers for piece in pieces if not _is_kept(piece, every)]
        third_line = {"left_out": union([_left_out(handle), *gone])}
        third = json.dumps(third_line, separators=(",", ":")).encode() + b"\n"
        kept_bytes = sum(piece.end - piece.start for piece in kept)
        lost = size - (len(first) + len(_second_line(0, every)) + len(third) + kept_bytes)
        if lost < most_bytes // 8:
            return False
        head_lines = first + _second_line(head.get("shift", 0) + lost, every) + third
        return _replace_log(rank_fd, handle, head_lines, kept, go_on)
    finally:
        os.close(handle)


def _replace_log(
    rank_fd: int, handle: int, head: bytes, kept: list[_Piece], go_on: Callable[[], bool]
) -> bool:
    clear(rank_fd)
    mode = os.fstat(handle).st_mode & 0o777
    try:
        out = open_file(_TEMPORARY, rank_fd, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            while head:
                head = head[os.write(out, head) :]
            done = all(_copy_piece(handle, out, piece, go_on) for piece in kept)
        finally:
            os.close(out)
        if done:
            os.replace(_TEMPORARY, STEPS_FILE, src_dir_fd=rank_fd, dst_dir_fd=rank_fd)
        return done
    finally:
        clear(rank_fd)


def clear(rank_fd: int) -> None:
    """Remove the temporary file left by a process killed during thinning, from a rank's open folder. Never raises."""
    with suppress(OSError):
        os.unlink(_TEMPORARY, dir_fd=rank_fd)


def _second_line(shift: int, every: int) -> bytes:
    """The second line of a thinned log. Its length does not depend on ``shift``."""
    return b'{"thinned":{"shift":%17d,"every":%d}}\n' % (shift, every)


def thinned_head(shift_to: int) -> bytes:
    """The first lines of a log that begins at position ``shift_to`` of its stream."""
    lines = json.dumps({"schema": STEPS_SCHEMA}, separators=(",", ":")).encode() + b"\n", b'{"left_out":[]}\n'
    size = len(lines[0]) + len(_second_line(0, 1)) + len(lines[1])
    return lines[0] + _second_line(shift_to - size, 1) + lines[1]


def _first_lines(handle: int, count: int) -> tuple[bytes, int]:
    """The line with the schema, and the position after the first ``count`` lines."""
    lines = os.pread(handle, _HEAD_BYTES + _LONGEST_LEFT_OUT, 0).split(b"\n", count)
    if len(lines) <= count or not lines[0].startswith(b'{"schema"'):
        return json.dumps({"schema": STEPS_SCHEMA}, separators=(",", ":")).encode() + b"\n", 0
    return lines[0] + b"\n", sum(len(line) + 1 for line in lines[:count])


def _pieces(
    handle: int, begin: int, size: int, most_bytes: int, go_on: Callable[[], bool]
) -> list[_Piece] | None:
    """Split the log from ``begin`` on; None if ``go_on`` returns False."""
    pieces = [_Piece(begin, None)]
    first_until, newest_from = begin + int(most_bytes * _FIRST_SHARE), size - int(most_bytes * _NEWEST_SHARE)
    position, rest = begin, b""
    while position < size:
        if not go_on():
            return None
        data = rest + os.pread(handle, min(_PIECE_BYTES, size - position), position)
        position += len(data) - len(rest)
        whole, cut, rest = data.rpartition(b"\n")
        for line in whole.split(b"\n") if cut else ():
            found = STEP_LINE.match(line)
            number = int(found.group(2)) if found else 0
            at = pieces[-1].end
            block = number // BLOCK_STEPS if found and first_until <= at < newest_from else None
            if block != pieces[-1].block:
                pieces.append(_Piece(at, block))
            is_step = found is not None and found.group(1) == b"step"
            pieces[-1].add(len(line) + 1, number if block is not None and is_step else None)
        time.sleep(_REST_S)
    # An incomplete last line is part of the newest ones.
    last = _Piece(pieces[-1].end, None)
    last.add(size - last.start, None)
    return [*pieces, last]


def _is_kept(piece: _Piece, every: int) -> bool:
    return piece.block is None or piece.block % every == 0


def _block_interval(pieces: list[_Piece], least: int, most_bytes: int) -> int:
    """The power of two such that the log fits if one block in this many is kept."""
    every, last = least, max((piece.block or 0 for piece in pieces), default=0)
    while every <= min(last, _MOST_EVERY // 2) and (
        sum(piece.end - piece.start for piece in pieces if _is_kept(piece, every)) > most_bytes * _KEPT_SHARE
    ):
        every *= 2
    return every


def _copy_piece(source: int, target: int, piece: _Piece, go_on: Callable[[], bool]) -> bool:
    position = piece.start
    while position < piece.end and go_on():
        data = os.pread(source, min(_PIECE_BYTES, piece.end - position), position)
        position += os.write(target, data)
    return position == piece.end
