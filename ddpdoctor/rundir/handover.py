"""Copies a rank's documents to the run directory, and compresses its profiler traces into it.

::

    <spool>/rank.json, flight.json, ending.json
                                       documents for the run directory; removed when copied
    <spool>/progress.json, standing.json, hang_flight.json, faults.txt, calls
                                       status files of a rank that stopped: copied after a request, or after the rank has ended
    <spool>/question                   the number of the launcher's request to the rank
    <spool>/trace.handover             path of the uncompressed trace, header to write into it, size limit
    <spool>/trace.<number>.handover    the same for a window requested while the job ran
    <spool>/carried.json               the outcome, for rank.json, because the rank may have ended

An uncompressed trace is saved in a separate folder to which no other user can write, and which can be found again. The profiler writes
to the given name and to that name with ``.tmp`` appended, and would follow a link placed there by another user. A rank killed
meanwhile leaves gigabytes.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Callable

from . import layout
from .calls_page import CALLS_PAGE, lines_of_calls
from .liveness import State, WriterMark, last_change_s, writer_in
from .owned import encoded, open_file, private_folder, read_file, read_object, replace_file
from .spool import own_roots_pattern

RAW_FILE = "trace.json"
_CHUNK = 1 << 20
_LEVEL = 3
"""gzip level. At higher levels the time grows faster than the file shrinks."""
_TRY_AGAIN_S = 30.0
"""Seconds until the compression of a trace that found no room is repeated from its beginning."""
_MOST_TROUBLES = 5


class TooLargeError(Exception):
    """The trace would exceed the allowed size."""


def copy_documents(spool: int, rank_fd: int) -> None:
    """Copy the documents in an open spool to the rank's open folder, and remove them from the spool. Raises OSError."""
    for name in sorted(layout.DOCUMENTS):
        aside = f"{name}{layout.ASIDE}"
        _put_back(name, aside, spool)  # left by an interrupted copy
        try:
            # What the rank writes meanwhile goes to a new file, which is copied next time.
            os.rename(name, aside, src_dir_fd=spool, dst_dir_fd=spool)
        except FileNotFoundError:
            continue
        try:
            data = read_file(aside, spool)
            if name == layout.RANK_FILE:
                data = _with_outcomes(data, _outcomes(spool))
            replace_file(name, rank_fd, data, mode=0o666)
        except BaseException:
            _put_back(name, aside, spool)
            raise
        os.unlink(aside, dir_fd=spool)


def _put_back(name: str, aside: str, spool: int) -> None:
    """Restore a document that was not copied, unless the rank has written a newer one. Raises OSError."""
    try:
        os.link(aside, name, src_dir_fd=spool, dst_dir_fd=spool, follow_symlinks=False)
    except FileExistsError:
        pass
    except FileNotFoundError:
        return
    os.unlink(aside, dir_fd=spool)


def copy_stop_files(spool: int, rank_fd: int, over: bool) -> None:
    """Copy the status files to the rank's open folder after a request, or if the rank is ``over``, i.e. no longer writes to the
    spool. Raises OSError."""
    mark = [
        _changed_ns(name, spool) for name in (layout.QUESTION_FILE, layout.STANDING_FILE, layout.FAULTS_FILE)
    ]
    if not over and (mark[0] is None or _outcomes(spool).get("last_words") == mark):
        return
    for name in sorted(layout.STOP_FILES | {CALLS_PAGE}):
        try:
            data = read_file(name, spool)
        except FileNotFoundError:
            continue
        if name == CALLS_PAGE:
            name, data = layout.CALLS_FILE, lines_of_calls(data)
        if data:
            replace_file(name, rank_fd, data, mode=0o666)
    _write_outcomes(spool, {**_outcomes(spool), "last_words": mark})


def _changed_ns(name: str, spool: int) -> int | None:
    try:
        return os.stat(name, dir_fd=spool, follow_symlinks=False).st_mtime_ns
    except FileNotFoundError:
        return None


def take_traces(spool: int, rank_fd: int, beat: Callable[[], None]) -> None:
    """Compress the traces that were handed over into the rank's open folder, and write the outcome to rank.json. Raises OSError if
    there is no room; a later call then tries again."""
    names = set(os.listdir(spool))
    for number in range(layout.MOST_CAPTURES + 1):
        if layout.handover_file(number) in names:
            _take_trace(spool, rank_fd, beat, number)


def _take_trace(spool: int, rank_fd: int, beat: Callable[[], None], number: int) -> None:
    handed_over = layout.handover_file(number)
    try:
        order = json.loads(read_file(handed_over, spool))
    except FileNotFoundError:
        return
    outcomes = _outcomes(spool)
    if time.monotonic() < float(outcomes.get("not_before_s") or 0.0):
        return
    try:
        window = _compressed(
            order, rank_fd, beat, layout.capture_file(number) if number else layout.TRACE_FILE
        )
    except OSError:
        _write_outcomes(spool, {**outcomes, "not_before_s": time.monotonic() + _TRY_AGAIN_S})
        raise
    if number:
        outcomes.setdefault("captures", {})[str(number)] = window
    else:
        outcomes["window"] = window
    _write_outcomes(spool, outcomes)
    replace_file(
        layout.RANK_FILE, rank_fd, _with_outcomes(read_file(layout.RANK_FILE, rank_fd), outcomes), mode=0o666
    )
    os.unlink(handed_over, dir_fd=spool)


def _compressed(order: dict[str, Any], rank_fd: int, beat: Callable[[], None], name: str) -> dict[str, Any]:
    """Compress one trace. Returns the fields of the window for rank.json."""
    temporary = f"{name}.tmp"
    raw = str(order["folder"])
    window: dict[str, Any] = {"state": "failed", "why": f"its uncompressed trace is gone ({raw})"}
    with suppress(FileNotFoundError):  # the job has removed its TMPDIR, or the folder is in another container
        with private_folder(raw) as source:
            try:
                size = _compress(source, rank_fd, temporary, order["header"], int(order["max_bytes"]), beat)
                os.replace(temporary, name, src_dir_fd=rank_fd, dst_dir_fd=rank_fd)
                window = {"state": "saved", "bytes": size}
            except TooLargeError as error:
                window = {"state": "skipped", "why": str(error)}
            except (ValueError, FileNotFoundError) as error:
                window = {"state": "failed", "why": f"{type(error).__name__}: {error}"}
            finally:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=rank_fd)
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
    """Compress a trace. Returns its compressed size in bytes. Raises TooLargeError, OSError, ValueError."""
    with suppress(FileNotFoundError):
        os.unlink(
            temporary, dir_fd=rank_fd
        )  # left by an interrupted run; not truncated, because it might be a hard link to another file
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
    """Add to rank.json, when it is copied next, that something could not be copied. Never raises."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        from .privacy import mask_text

        words, outcomes = mask_text(words), _outcomes(spool)
        known = outcomes.setdefault("errors", [])
        if words not in known and len(known) < _MOST_TROUBLES:
            known.append(words)
            _write_outcomes(spool, outcomes)


def _outcomes(spool: int) -> dict[str, Any]:
    return read_object(layout.CARRIED_FILE, spool) or {}


def _write_outcomes(spool: int, outcomes: dict[str, Any]) -> None:
    replace_file(layout.CARRIED_FILE, spool, encoded(outcomes))


def _with_outcomes(data: bytes, outcomes: dict[str, Any]) -> bytes:
    """The content of rank.json with the outcome of its traces and copies."""
    document = json.loads(data)
    if "window" in outcomes:
        document["window"] = {**(document.get("window") or {}), **outcomes["window"]}
    for capture in document.get("captures") or []:
        capture.update((outcomes.get("captures") or {}).get(str(capture.get("number")), {}))
    if outcomes.get("errors"):
        hook = document.setdefault("hook", {})
        hook["errors"] = list(dict.fromkeys([*hook.get("errors", []), *outcomes["errors"]]))
    return encoded(document)


_NAME = re.compile(r"^ddpdoctor-raw-([0-9a-f]{16})?-(\d+)-\w+$")
HANDED_OVER = "handed-over"
"""A file that marks a trace to be compressed by another process."""
_STALE_S = 24 * 3600.0
"""Age of a folder after which it is removed; saving a trace takes less."""


class RawFolder:
    """The folder of one trace."""

    def __init__(self, path: str, handle: int) -> None:
        self.path = path
        by_handle = f"/proc/self/fd/{handle}"
        self.place = by_handle if os.path.isdir(by_handle) else path
        """The path to write to. By descriptor if possible, because another user who owns the parent folder may rename entries in
        it."""
        self.handed_over = False
        """Whether another process compresses the trace and removes the folder."""
        self._handle = handle

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """A context in which the trace is queued for another process, which may compress it at once. Raises OSError."""
        os.close(os.open(HANDED_OVER, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._handle))
        yield
        self.handed_over = True


@contextmanager
def raw_folder(base: str, run_id: str | None) -> Iterator[RawFolder]:
    """Create a folder below ``base``; it is removed at the end of the block unless it was handed over. Raises OSError."""
    path = tempfile.mkdtemp(prefix=f"ddpdoctor-raw-{run_id or ''}-{os.getpid()}-", dir=base)
    handed_over = False
    try:
        with private_folder(path) as handle:
            raw, writing = RawFolder(path, handle), WriterMark(handle)
            try:
                yield raw
            finally:
                writing.end()
                handed_over = raw.handed_over
    finally:
        if not handed_over:
            shutil.rmtree(path, ignore_errors=True)


def clear_raw_folders(bases: Iterable[str], run_id: str | None) -> None:
    """Remove folders left by killed ranks: those of the run ``run_id``, and any that is a day old. Never raises. Only this user's
    folders count. One that was handed over is removed only after the spool that refers to it is gone."""
    for base in bases:
        try:
            names = [name for name in os.listdir(base) if _NAME.match(name)]
        except OSError:
            continue
        for name in names:
            try:
                _clear(os.path.join(base, name), run_id)
            except OSError:
                continue


def _clear(folder: str, run_id: str | None) -> None:
    found = _NAME.match(os.path.basename(folder))
    if found is None:
        return
    with private_folder(folder) as handle:
        of_this_run = run_id is not None and found.group(1) == run_id
        names = os.listdir(handle)
        if HANDED_OVER in names and glob.glob(own_roots_pattern(found.group(1))):
            return
        # The process that handed it over no longer writes to it.
        state = State.OVER if HANDED_OVER in names else writer_in(handle).state
        is_stale = state is not State.WRITING and last_change_s(handle) < time.time() - _STALE_S
        if is_stale or (of_this_run and state is State.OVER):
            for name in names:
                os.unlink(name, dir_fd=handle)
            os.rmdir(folder)
