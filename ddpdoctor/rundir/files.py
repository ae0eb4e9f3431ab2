"""Writes files so that they survive a crash, and reads files that may be damaged or untrusted.

A file read here may come from another user or program. So only regular files are read, links inside a run directory are not
followed, reading never blocks, and lengths, nesting and numbers are limited.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from .notes import Note, NoteCode
from .owned import encoded, replace_file

MOST_DOCUMENT_BYTES = 16 << 20
"""Upper limit of a document; a rank.json of a job with a thousand modules has less than 1 MiB."""
MOST_LINE_BYTES = 16 << 20
"""Upper limit of a line; a step of ten thousand micro-batches has less than 2 MiB."""
_MOST_NESTED = 40
"""Upper limit of nested levels; the format has six."""
_BLOCK_BYTES = 512
"""Unit of ``st_blocks`` in bytes, on every file system."""
_MOST_HOLLOW = 64
"""Largest allowed ratio of a file's size to its stored blocks; far more than compressing file systems achieve."""
_LEAST_HOLLOW_BYTES = 64 << 20
"""Files up to this size, bytes, are accepted: they are read quickly even if they are all holes, and some file systems store small
files without any block."""
_LEAST_NUMBER, _MOST_NUMBER = -(1 << 63), (1 << 63) - 1
_MOST_NAMED = 8
_MOST_LISTED = 3
_LINK = "it is a link, and links in a run directory are not followed"


def write_json(path: str, document: Any) -> None:
    """Replace ``path`` as a whole: written to a temporary file, then renamed. A link is replaced, not followed. Raises OSError or
    TypeError; ``path`` is then unchanged."""
    replace_file(path, None, encoded(document), mode=0o666)


def open_regular(path: str, dir_fd: int | None = None, follow: bool = False) -> int:
    """Open the regular file ``path`` for reading, relative to ``dir_fd`` if given, and return its descriptor. Never blocks.

    ``follow``: follow a link at the end of ``path``, which is right for a path given by the user. Raises OSError if the file cannot
    be opened, is a link, or is not a regular file: opening a FIFO blocks, and a device may have any effect.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    _refuse_irregular(os.stat(path, dir_fd=dir_fd, follow_symlinks=follow), path)
    handle = os.open(path, flags, dir_fd=dir_fd)
    try:
        # Check again, because the name may refer to another file now.
        _refuse_irregular(os.fstat(handle), path)
    except OSError:
        os.close(handle)
        raise
    return handle


def is_hollow(status: os.stat_result) -> bool:
    """Whether a file consists mostly of holes, which take time to read and contain no data."""
    stored = status.st_blocks * _BLOCK_BYTES * _MOST_HOLLOW
    return status.st_size > max(stored, _LEAST_HOLLOW_BYTES)


def _refuse_irregular(found: os.stat_result, path: str) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, _LINK, path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", path)


def reading(path: str) -> BinaryIO:
    """Open the regular file ``path`` of a run directory for reading. Raises OSError as :func:`open_regular` does."""
    return os.fdopen(open_regular(path), "rb")


def read_bounded(path: str, most_bytes: int, follow: bool = False) -> bytes:
    """Read the regular file ``path``. Raises OSError as :func:`open_regular` does, and if it is larger than ``most_bytes``."""
    with os.fdopen(open_regular(path, follow=follow), "rb") as source:
        data = source.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", path)
    return data


def is_regular(path: str) -> bool:
    """Whether ``path`` is a regular file and not a link."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def folders_in(path: str) -> list[str]:
    """Sorted names of the folders in ``path``, without links. Raises OSError, also if ``path`` itself is a link."""
    if os.path.islink(path):
        raise OSError(errno.ELOOP, _LINK, path)
    return sorted(
        name for name in os.listdir(path) if stat.S_ISDIR(os.lstat(os.path.join(path, name)).st_mode)
    )


def bounded_lines(source: BinaryIO) -> Iterator[bytes]:
    """Yield each line of ``source``; the last one may be incomplete. A line longer than the format allows is cut, so that every
    reader counts it as broken, and ends the iteration."""
    while line := source.readline(MOST_LINE_BYTES):
        if len(line) == MOST_LINE_BYTES and not line.endswith(b"\n"):
            yield line[:80] + b"...\n"
            return
        yield line


def parsed(data: bytes) -> tuple[Any, list[str]]:
    """Parse JSON. Returns the value, and ``name (value)`` for each number replaced by None because it is not finite or needs more
    than 64 bits. Raises ValueError, with a reason in words, if it is not JSON or nested too deep."""
    replaced: list[str] = []
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError as error:
        raise ValueError(_why_no_json(error)) from None
    if isinstance(value, (dict, list)):
        _check_bounds(value, "", 1, replaced)
    return value, replaced


def _why_no_json(error: ValueError) -> str:
    """An error of ``json`` in plain words."""
    if isinstance(error, UnicodeDecodeError):
        return "it is no JSON: it holds bytes that are no text"
    if not isinstance(error, json.JSONDecodeError):
        return "a number in it has too many digits"
    text = error.doc.rstrip()
    if not text:
        return "it is empty"
    if error.pos >= len(text) or error.msg.startswith("Unterminated string"):
        return "it is cut off"
    return f"it is no JSON: line {error.lineno}, character {error.colno}"


def _check_bounds(value: Any, name: str, depth: int, replaced: list[str]) -> None:
    if depth > _MOST_NESTED:
        raise ValueError("it is nested too deep")
    is_list = isinstance(value, list)
    for key, item in enumerate(value) if is_list else value.items():
        kind = type(item)
        if kind is dict or kind is list:
            _check_bounds(item, name if is_list else str(key), depth + 1, replaced)
        # NaN, infinities and numbers that need more than 64 bits all fail this test.
        elif (kind is int or kind is float) and not _LEAST_NUMBER <= item <= _MOST_NUMBER:
            replaced.append(f"{name if is_list else key} ({short(item)})")
            value[key] = None


def short(value: Any) -> str:
    """A value from a file, shortened for a sentence."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def ignored(path: str, fields: list[str]) -> Note:
    """A note that ``fields`` of ``path``, each ``name (value)``, are ignored."""
    return Note(
        f"{path}: fields with values that they cannot have are ignored: {listed(fields, _MOST_NAMED)}."
    )


def listed(names: Sequence[object], most: int = _MOST_LISTED) -> str:
    """The first ``most`` of ``names``, and how many more there are."""
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")


def tensors_in_words(tensors: str) -> str:
    """Sizes and dtype of a collective's input as a noun phrase: "2048x5120 BFloat16" -> "a 2048x5120 BFloat16 tensor", "4, 8 Float" ->
    "tensors of 4, 8 Float"."""
    sizes, _, dtype = tensors.rpartition(" ")
    is_single = bool(dtype) and all(size.isdecimal() for size in sizes.split("x"))
    return f"a {tensors} tensor" if is_single else f"tensors of {tensors}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """[1] -> "rank 1", [1, 3, 5] -> "ranks 1, 3 and 5", [0, 8, 9, 10] -> "ranks 0 and 8 to 10"; long lists are truncated."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs = runs_of(ranks)
    names = [name for run in runs for name in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    if len(names) > _MOST_NAMED:
        shown = _MOST_NAMED - 2
        return f"ranks {', '.join(names[:shown])} and {len(ranks) - sum(map(len, runs[:shown]))} others"
    return "ranks " + " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Runs of consecutive numbers in rising order. A run of two is split, which reads better."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [part for run in runs for part in ([run] if len(run) > 2 else [[number] for number in run])]


def reason_of(error: OSError) -> str:
    """An error of the operating system in words."""
    return error.strerror or str(error)


def unreadable(path: str, error: Exception, lost: str = "") -> Note:
    """A note that ``path`` exists but cannot be read. ``lost``: what is therefore unknown, without a period."""
    reason = getattr(error, "strerror", None) or error
    text = f"{path} cannot be read ({reason}): {lost}." if lost else f"{path} cannot be read: {reason}."
    return Note(text, NoteCode.UNREADABLE)


def broken_lines(path: str, count: int) -> Note:
    """A note that ``count`` lines of ``path`` are broken."""
    return Note(f"{path}: {count} broken line{'s' if count > 1 else ''} left out.")


def read_json(path: str, notes: list[Note], lost: str = "") -> dict[str, Any] | None:
    """Read the JSON object in ``path``; None if it is missing or broken. A note then says what is ``lost``. Numbers that the format
    does not allow become None, with a note."""
    try:
        document, replaced = parsed(read_bounded(path, MOST_DOCUMENT_BYTES))
    except FileNotFoundError:
        notes.append(Note(f"{path} is missing{lost and ': '}{lost}."))
        return None
    except (OSError, ValueError) as error:
        notes.append(unreadable(path, error, lost))
        return None
    if not isinstance(document, dict):
        notes.append(Note(f"{path} does not hold a JSON object{lost and ': '}{lost}."))
        return None
    if replaced:
        notes.append(ignored(path, replaced))
    return document
