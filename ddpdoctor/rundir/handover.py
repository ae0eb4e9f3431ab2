"""Copies a rank's documents to the run directory, and compresses its profiler traces into it.

::

    <spool>/rank.json, flight.json     as they are to be in the run directory; gone once they are there; and ending.json
    <spool>/progress.json, standing.json, hang_flight.json, faults.txt, calls
                                       status files of a rank that stopped: copied after a request, or once the rank has ended
    <spool>/question                   the number of the launcher's request to the rank
    <spool>/trace.handover             where the uncompressed trace is, what to write before it, how large it may become
    <spool>/trace.<number>.handover    the same of a window that was asked for while the job ran
    <spool>/carried.json               the outcome, for rank.json: the rank may have ended by then
"""

from __future__ import annotations

import gzip
import json
import os
import time
from typing import Any, Callable

from .calls_page import CALLS_PAGE, lines_of_calls
from .layout import (
    CALLS_FILE,
    ENDING_FILE,
    FAULTS_FILE,
    FLIGHT_FILE,
    HANG_FLIGHT_FILE,
    MOST_CAPTURES,
    PROGRESS_FILE,
    RANK_FILE,
    STANDING_FILE,
    TRACE_FILE,
    capture_file,
)
from .owned import encoded, identity_of, open_file, private_folder, read_file, read_object, replace_file

HANDOVER_FILE = "trace.handover"
CARRIED_FILE = "carried.json"
ASIDE = ".copied"
"""Behind the name of a document that is being copied."""
DOCUMENTS = frozenset([RANK_FILE, FLIGHT_FILE, ENDING_FILE])
STOP_FILES = frozenset([PROGRESS_FILE, STANDING_FILE, HANG_FLIGHT_FILE, FAULTS_FILE])
"""Status files. They stay in the spool, where the launcher reads them even if the run directory's storage hangs."""
QUESTION_FILE = "question"
STACKS_QUESTION, STACKS_FILE = "stacks.question", "stacks.json"
CAPTURE_ORDER, CAPTURE_ANSWER = "capture.order", "capture.json"
QUESTIONS = frozenset([QUESTION_FILE, STACKS_QUESTION, STACKS_FILE, CAPTURE_ORDER, CAPTURE_ANSWER])
"""Requests to a rank, see :mod:`.requests`, and those answers that stay in the spool."""
RAW_FILE = "trace.json"
_CHUNK = 1 << 20
_LEVEL = 3
"""Of gzip: beyond it the time grows faster than the file shrinks."""
_TRY_AGAIN_S = 30.0
"""Seconds until a trace that found no room is compressed again from its beginning."""
_MOST_TROUBLES = 5


class TooLargeError(Exception):
    """The trace would take more than was allowed."""


def handover_file(number: int) -> str:
    """Name of the file by which a window's trace is handed over; 0 is the first window, which needs no request."""
    return f"trace.{number}.handover" if number else HANDOVER_FILE


def copy_documents(spool: int, rank_fd: int) -> None:
    """Copy the documents in an open spool to the rank's open folder, and remove them from the spool. Raises OSError."""
    for name in sorted(DOCUMENTS):
        aside = f"{name}{ASIDE}"
        _put_back(name, aside, spool)  # of a copy that was cut off
        try:
            # What the rank writes meanwhile is another file, to be copied the next time.
            os.rename(name, aside, src_dir_fd=spool, dst_dir_fd=spool)
        except FileNotFoundError:
            continue
        try:
            data = read_file(aside, spool)
            if name == RANK_FILE:
                data = _with_news(data, _outcomes(spool))
            replace_file(name, rank_fd, data, mode=0o666)
        except BaseException:
            _put_back(name, aside, spool)
            raise
        os.unlink(aside, dir_fd=spool)


def _put_back(name: str, aside: str, spool: int) -> None:
    """A document that was not copied, unless the rank has written a newer one since. Raises OSError."""
    try:
        os.link(aside, name, src_dir_fd=spool, dst_dir_fd=spool, follow_symlinks=False)
    except FileExistsError:
        pass
    except FileNotFoundError:
        return
    os.unlink(aside, dir_fd=spool)


def copy_stop_files(spool: int, rank_fd: int, over: bool) -> None:
    """Copy the status files to the rank's open folder after a request, or if the rank is ``over``: its process
    writes to the spool no more. Raises OSError."""
    mark = [_changed_ns(name, spool) for name in (QUESTION_FILE, STANDING_FILE, FAULTS_FILE)]
    if not over and (mark[0] is None or _outcomes(spool).get("last_words") == mark):
        return
    for name in sorted(STOP_FILES):
        try:
            data = read_file(name, spool)
        except FileNotFoundError:
            continue
        if data:
            replace_file(name, rank_fd, data, mode=0o666)
    lines = (
        lines_of_calls(read_file(CALLS_PAGE, spool)) if identity_of(CALLS_PAGE, spool) is not None else b""
    )
    if lines:
        replace_file(CALLS_FILE, rank_fd, lines, mode=0o666)
    _write_outcomes(spool, {**_outcomes(spool), "last_words": mark})


def _changed_ns(name: str, spool: int) -> int | None:
    try:
        return os.stat(name, dir_fd=spool, follow_symlinks=False).st_mtime_ns
    except FileNotFoundError:
        return None


def take_traces(spool: int, rank_fd: int, beat: Callable[[], None]) -> None:
    """Compress the traces that were handed over, if some were, into the rank's open folder, and write the outcome to
    rank.json. Raises OSError where there is no room; it is tried again later then."""
    there = set(os.listdir(spool))
    for number in range(MOST_CAPTURES + 1):
        if handover_file(number) in there:
            _take_trace(spool, rank_fd, beat, number)


def _take_trace(spool: int, rank_fd: int, beat: Callable[[], None], number: int) -> None:
    handed_over = handover_file(number)
    try:
        order = json.loads(read_file(handed_over, spool))
    except FileNotFoundError:
        return
    news = _outcomes(spool)
    if time.monotonic() < float(news.get("not_before_s") or 0.0):
        return
    try:
        window = _compressed(order, rank_fd, beat, capture_file(number) if number else TRACE_FILE)
    except OSError:
        _write_outcomes(spool, {**news, "not_before_s": time.monotonic() + _TRY_AGAIN_S})
        raise
    if number:
        news.setdefault("captures", {})[str(number)] = window
    else:
        news["window"] = window
    _write_outcomes(spool, news)
    replace_file(RANK_FILE, rank_fd, _with_news(read_file(RANK_FILE, rank_fd), news), mode=0o666)
    os.unlink(handed_over, dir_fd=spool)


def _compressed(order: dict[str, Any], rank_fd: int, beat: Callable[[], None], name: str) -> dict[str, Any]:
    """Compress one trace. Returns what rank.json is to say of the window."""
    temporary = f"{name}.tmp"
    raw = str(order["folder"])
    with private_folder(raw) as source:
        try:
            size = _compress(source, rank_fd, temporary, order["header"], int(order["max_bytes"]), beat)
            os.replace(temporary, name, src_dir_fd=rank_fd, dst_dir_fd=rank_fd)
            window: dict[str, Any] = {"state": "saved", "bytes": size}
        except TooLargeError as error:
            window = {"state": "skipped", "why": str(error)}
        except (ValueError, FileNotFoundError) as error:
            window = {"state": "failed", "why": f"{type(error).__name__}: {error}"}
        finally:
            try:
                os.unlink(temporary, dir_fd=rank_fd)
            except OSError:
                pass
        for name in os.listdir(source):
            os.unlink(name, dir_fd=source)
    os.rmdir(raw)
    return window


def _compress(
    source: int,
    rank_fd: int,
    temporary: str,
    header: dict[str, Any],
    max_bytes: int,
    beat: Callable[[], None],
) -> int:
    """Copy a trace, compressed; its size in bytes. Raises TooLargeError, OSError, ValueError."""
    try:
        os.unlink(
            temporary, dir_fd=rank_fd
        )  # cut off; truncated instead, it might be a hard link to another file
    except FileNotFoundError:
        pass
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with (
        open(open_file(RAW_FILE, source, os.O_RDONLY), "rb") as trace,
        open(open_file(temporary, rank_fd, flags, 0o666), "wb") as out,
    ):
        first = trace.read(_CHUNK)
        brace = first.find(b"{")
        if brace < 0:
            raise ValueError("the profiler wrote no JSON object")
        with gzip.GzipFile("", "wb", _LEVEL, out) as packed:
            packed.write(b"{\n" + json.dumps(header)[1:-1].encode() + b",\n" + first[brace + 1 :])
            while True:
                chunk = trace.read(_CHUNK)
                if not chunk:
                    break
                packed.write(chunk)
                beat()
                if out.tell() > max_bytes:
                    raise TooLargeError(
                        f"the trace takes more than {max_bytes // 1_000_000} MB; see --max-trace-mb"
                    )
        return out.tell()


def add_trouble(spool: int, words: str) -> None:
    """Have rank.json say that something could not be copied, once it can be copied. Never raises."""
    try:
        from .privacy import mask_text

        words, news = mask_text(words), _outcomes(spool)
        known = news.setdefault("errors", [])
        if words not in known and len(known) < _MOST_TROUBLES:
            known.append(words)
            _write_outcomes(spool, news)
    except (OSError, ValueError, AttributeError, TypeError):
        pass


def _outcomes(spool: int) -> dict[str, Any]:
    return read_object(CARRIED_FILE, spool) or {}


def _write_outcomes(spool: int, news: dict[str, Any]) -> None:
    replace_file(CARRIED_FILE, spool, encoded(news))


def _with_news(data: bytes, news: dict[str, Any]) -> bytes:
    """The content of rank.json with the outcome of its traces and copies."""
    document = json.loads(data)
    if "window" in news:
        document["window"] = {**(document.get("window") or {}), **news["window"]}
    for capture in document.get("captures") or []:
        capture.update((news.get("captures") or {}).get(str(capture.get("number")), {}))
    if news.get("errors"):
        hook = document.setdefault("hook", {})
        hook["errors"] = list(dict.fromkeys([*hook.get("errors", []), *news["errors"]]))
    return encoded(document)
