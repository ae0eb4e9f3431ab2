"""Copies spools to the run directory.

A spool is copied by the rank's writer thread, a process of its launcher or of another launcher of the host, or a reader of
the run. Other users may create files with the name of a spool in memory-backed storage, and the target folder may have been
replaced. So both are opened by :mod:`.owned`, only the files that a rank writes are copied, and a spool counts only for the
run whose id is in its root's name.

Lost parts of a stream are replaced by a note, and copying continues after them. A stream's position in the run directory is
the file's size there plus the bytes removed by thinning. So a gap must be filled; otherwise the data after it would be copied
again every second.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Callable, NamedTuple

from . import layout, owned
from .calls_page import CALLS_PAGE
from .compaction import STEP_LINES, DiskBudget, last_step, stream_end, stream_end_of, thinned_head
from .compaction import clear as clear_thinned
from .files import reason_of
from .handover import add_trouble, copy_documents, copy_stop_files, take_traces
from .heartbeat import HEARTBEAT_FILE, unwritten_steps
from .host_files import copy_host_documents
from .liveness import WRITER_FILES, is_over
from .segments import segments_in, uncopied_bytes, whole_lines
from .spool import RESERVE_FILE, path_name, roots_of, spools_in
from .stepevents import LineField, brief_lines

PATIENCE_S = 2.0
"""Seconds that a copy waits for another copy of the same spool, whose process may be suspended."""
_POLL_S = 0.02
_copying: dict[tuple[int, int] | None, object] = {}
"""Spools that threads of this process are copying, by the identity of their folders."""
os.register_at_fork(after_in_child=_copying.clear)
_LOCK_FILE = "lock"
_STREAMS = frozenset([layout.STEPS_FILE, layout.SAMPLES_FILE, layout.MEMORY_FILE, layout.WORKERS_FILE])


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class BusyError(OSError):
    """Another process or thread is still copying the spool at the deadline."""


class Waiting(NamedTuple):
    """The records in one rank's spool that are not in the run directory."""

    spool: str
    steps: int
    size: int
    """Bytes."""


def recover(run: str) -> list[str]:
    """Copy the spools left by ranks of this run that were killed together with their launcher. Never raises. Returns sentences
    about what could not be copied to the run directory."""
    waiting: list[Waiting] = []
    failure = None
    deadline_s = time.monotonic() + PATIENCE_S
    for root in roots_of(run):
        with suppress(OSError):  # there are none, or copying the ranks' records fails, too
            copy_host_documents(root, run)
    for directory, target in spools_of(run):
        try:
            drain(directory, run=run, deadline_s=deadline_s, with_stop_files=True)
        except (FileNotFoundError, layout.OtherRunError):
            continue
        except OSError as error:
            failure = error
            waiting.append(waiting_in(directory, target))
    return [] if failure is None else [unsaved_sentence(run, waiting, failure)]


def spools_of(run: str) -> list[tuple[str, str]]:
    """The spools of a run on this host, each with its rank's folder in the run directory. Never raises."""
    found = []
    for directory in (spool for root in roots_of(run) for spool in spools_in(root)):
        try:
            found.append((directory, _place_in(run, layout.target_of(directory))))
        except OSError:
            continue
    return found


def _place_in(run: str, target: str) -> str:
    """Return ``target``, or the same folder below ``run`` if the run was moved there. If ``run`` is a copy, or the same folder by
    another path, records go to the original."""
    moved = os.path.join(os.path.abspath(run), os.path.relpath(target, layout.run_of(target)))
    if moved == target or layout.run_id(run) == layout.run_id(layout.run_of(target)):
        return target
    return moved


def drain(
    directory: str,
    remove: bool = False,
    run: str | None = None,
    deadline_s: float | None = None,
    budget: DiskBudget | None = None,
    beat: Callable[[], None] = lambda: None,
    with_stop_files: bool = False,
) -> str:
    """Copy a rank's spool into its run directory. With ``remove``, delete the spool afterwards. Returns the rank's folder.

    Safe to repeat and to run from several processes. Raises OSError if the target cannot be written, OtherRunError if it
    now belongs to another run, UntrustedFileError if it is another user's, and BusyError if another copy is still running at
    ``deadline_s``, monotonic; the spool is then kept. ``run`` is the current place of the run directory; None: the original one.
    ``budget`` limits the step log there. ``beat`` is called on progress and while waiting for another copy.
    ``with_stop_files``: copy the rank's status files even without a request.
    """
    root = os.path.dirname(directory)
    over = (remove or with_stop_files) and is_over(directory)
    with layout.opened_spool(directory) as spool_fd:
        with _locked(spool_fd, time.monotonic() + PATIENCE_S if deadline_s is None else deadline_s, beat):
            target = layout.read_target(spool_fd)  # under the lock: an earlier copy may have claimed a folder
            if run is not None:
                target = _place_in(run, target)
            _refuse_other_run(layout.run_of(target), root)
            try:
                with owned.folder(layout.run_of(target), links=True) as run_folder:
                    if not owned.is_own(run_folder):
                        raise owned.UntrustedFileError(
                            errno.EPERM, "it belongs to another user", layout.run_of(target)
                        )
                    target = _claim_folder(target, directory, spool_fd, run_folder)
                    with (
                        owned.folder("ranks", run_folder) as ranks,
                        owned.folder(os.path.basename(target), ranks) as rank_fd,
                    ):
                        _copy_all(spool_fd, rank_fd, beat)
                        if over:
                            _complete_steps(spool_fd, rank_fd)
                        copy_stop_files(spool_fd, rank_fd, remove or with_stop_files)
                        if remove:
                            clear_thinned(rank_fd)
                        elif budget is not None:
                            budget.keep(rank_fd)
            except OSError as error:
                add_trouble(spool_fd, f"{target} could not be written ({reason_of(error)}).")
                raise
            if remove:
                _clear(spool_fd)
        if remove:
            with owned.private_folder(root) as root_fd:
                os.rmdir(os.path.basename(directory), dir_fd=root_fd)
    return target


def _claim_folder(target: str, directory: str, spool: int, run: int) -> str:
    """Return the rank's folder in the open run directory; create it if there is none."""
    if not layout.is_unclaimed(target):
        return target
    named = layout.parse_spool_name(directory)
    name = layout.claim_rank_directory(run, named[0] if named else 0)
    claimed = os.path.join(target, name)
    try:
        owned.replace_file(layout.TARGET_FILE, spool, os.fsencode(claimed))
    except OSError:
        with owned.folder("ranks", run) as ranks:
            os.rmdir(
                name, dir_fd=ranks
            )  # otherwise each retry without memory for the name would create another one
        raise
    return claimed


def discard(directory: str) -> None:
    """Delete a spool with its content. Raises OSError, and deletes nothing, if it is being copied."""
    with layout.opened_spool(directory) as spool_fd:
        with _locked(spool_fd, time.monotonic()):
            _clear(spool_fd)
        with owned.private_folder(os.path.dirname(directory)) as root_fd:
            os.rmdir(os.path.basename(directory), dir_fd=root_fd)


@contextmanager
def _locked(spool: int, deadline_s: float, beat: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the spool's lock against other processes and threads. Raises BusyError. ``beat`` is called while it waits, because a
    lock held by another process does not mean that the storage does not answer."""
    key = owned.file_identity(spool)
    mine = object()
    # A single operation instead of a lock object, which a fork could inherit in locked state.
    while _copying.setdefault(key, mine) is not mine:
        _wait(deadline_s, "another thread is copying it", beat)
    try:
        # Not earlier: a record lock belongs to the process and is lost when any of its threads closes the file.
        handle = owned.open_file(_LOCK_FILE, spool, os.O_RDWR | os.O_CREAT)
        try:
            while not owned.lock_now(handle):
                _wait(deadline_s, "another process is copying it", beat)
            try:
                yield
            finally:
                owned.unlock(handle)
        finally:
            os.close(handle)
    finally:
        _copying.pop(key, None)


def _wait(deadline_s: float, why: str, beat: Callable[[], None]) -> None:
    if time.monotonic() >= deadline_s:
        raise BusyError(errno.EBUSY, why)
    beat()
    time.sleep(_POLL_S)


def _refuse_other_run(run: str, root: str) -> None:
    """Raise OtherRunError if a spool in ``root`` does not belong to ``run``."""
    known = layout.id_of_root(root)
    if known is None:
        if f"-{path_name(run)}-" not in f"{os.path.basename(root)}-":
            raise layout.OtherRunError(errno.EINVAL, "it is not the run that these records are of", run)
        return
    layout.refuse_other_run(run, known)


def _copy_all(spool: int, rank_fd: int, beat: Callable[[], None]) -> None:
    for stream, parts in segments_in(spool).items():
        if stream in _STREAMS and (
            stream != layout.WORKERS_FILE or os.stat(parts[-1][1], dir_fd=spool).st_size
        ):
            _copy(parts, spool, stream, rank_fd, beat)
    copy_documents(spool, rank_fd)
    take_traces(spool, rank_fd, beat)


def _copy(
    parts: list[tuple[int, str]], spool: int, stream: str, rank_fd: int, beat: Callable[[], None]
) -> None:
    out = owned.open_file(stream, rank_fd, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        done = stream_end(out)
        for index, (position, name) in enumerate(parts):
            data = whole_lines(owned.read_file(name, spool, max(0, done - position)))
            if data and position > done:
                _append(out, bridge(out, stream, done, position, data), whole=True)
                done = position
            _append(out, data)
            done += len(data)
            beat()
            if index + 1 < len(parts):
                os.unlink(name, dir_fd=spool)
    finally:
        os.close(out)


def _complete_steps(spool: int, rank_fd: int) -> None:
    """Append the steps that only the heartbeat's page has to the copied log of a rank that has ended. Raises OSError."""
    try:
        page = owned.read_file(HEARTBEAT_FILE, spool)
        out = owned.open_file(layout.STEPS_FILE, rank_fd, os.O_RDWR | os.O_APPEND)
    except FileNotFoundError:
        return
    try:
        known = last_step(out)
        first, times_ns = unwritten_steps(page, 0 if known is None else known + 1)
        _append(out, brief_lines(first, times_ns).encode(), whole=True)
    finally:
        os.close(out)


def _append(out: int, data: bytes, whole: bool = False) -> None:
    """Append ``data``. Raises OSError; with ``whole``, nothing of it is then in the file."""
    size = os.fstat(out).st_size
    try:
        while data:
            data = data[os.write(out, data) :]
    except OSError:
        if whole:
            os.ftruncate(out, size)
        raise


def _clear(spool: int) -> None:
    """Delete the files of a spool that a rank or a copy creates. Any other file stays, and so does the folder."""
    removable = (
        layout.DOCUMENTS
        | layout.STOP_FILES
        | layout.QUESTIONS
        | WRITER_FILES
        | {layout.TARGET_FILE, RESERVE_FILE, _LOCK_FILE, layout.CARRIED_FILE, HEARTBEAT_FILE, CALLS_PAGE}
        | {f"{name}{layout.ASIDE}" for name in layout.DOCUMENTS}
    )
    removable |= {layout.handover_file(number) for number in range(layout.MOST_CAPTURES + 1)}
    for name in os.listdir(spool):
        if name in removable or name.rpartition(".")[0] in _STREAMS or name.endswith(".tmp"):
            os.unlink(name, dir_fd=spool)


_LINE_BYTES = 64 * 1024
_MOST_FILLED_BYTES = 1024 * 1024
_LOST_REASON = "their memory was removed before it was copied, as cleaners of /dev/shm do, or systemd at a logout (RemoveIPC)"


def bridge(out: int, stream: str, done: int, position: int, data: bytes) -> bytes:
    """The bytes to write to the open file ``out`` from position ``done`` of the stream on, so that ``data`` follows at its own
    ``position``. Raises OSError."""
    words = _lost_steps(out, data) if stream == layout.STEPS_FILE else ""
    sentences = [f"{words}: {_LOST_REASON}.", f"{words}."] if words else []
    filled, missing = b"", position - done
    if not done and missing > _MOST_FILLED_BYTES:
        # The log was removed, and it may have been long.
        missing = len(_note(sentences[0] if sentences else "", 0))
        filled = thinned_head(position - missing)
    while missing > 2 * _LINE_BYTES:
        filled, missing = filled + _note("", _LINE_BYTES), missing - _LINE_BYTES
    fits = next((each for each in (*sentences, "") if len(_note(each, 0)) <= missing), None)
    return filled + (b"\n" * missing if fits is None else _note(fits, missing))


def _note(words: str, size: int) -> bytes:
    """A note line of ``size`` bytes, or longer if needed."""
    line = f"{{{LineField.NOTE.key}{json.dumps(words)}".encode()
    return line + b" " * (size - len(line) - 2) + b"}\n"


def _lost_steps(out: int, data: bytes) -> str:
    """The steps missing between the end of the open file and ``data``, as text; "" if none."""
    before, after = last_step(out), STEP_LINES.search(data)
    first, last = 0 if before is None else before + 1, int(after[1]) - 1 if after else -1
    if after is None:
        return f"Steps from {first} on were lost"
    if first > last:
        return ""
    return f"Step {first} was lost" if first == last else f"Steps {first} to {last} were lost"


def waiting_in(spool: str, target: str) -> Waiting:
    """The records that are in ``spool`` and not in the rank's folder ``target``. Never raises."""
    steps = size = 0
    try:
        with layout.opened_spool(spool) as spool_fd:
            streams = segments_in(spool_fd)
            size = sum(
                os.stat(n, dir_fd=spool_fd).st_size for n in os.listdir(spool_fd) if n in layout.DOCUMENTS
            )
    except OSError:
        return Waiting(spool, 0, 0)
    for stream in streams:
        uncopied = uncopied_bytes(spool, stream, stream_end_of(os.path.join(target, stream)))
        size += len(uncopied)
        if stream == layout.STEPS_FILE:
            steps = uncopied.count(b'"t":[')
    return Waiting(spool, steps, size)


def unsaved_sentence(run: str, waiting: list[Waiting], error: OSError) -> str:
    """A sentence about what is not in the run directory, where it is, and what to do."""
    steps, ranks = sum(each.steps for each in waiting), len(waiting)
    what = f"{steps} recorded step{'s' if steps != 1 else ''}" if steps else "What was recorded"
    places = sorted({os.path.dirname(each.spool) for each in waiting})
    remedy = "free some space for that directory" if error.errno in _NO_ROOM else "once that is fixed"
    return (
        f"{what} of {ranks} rank{'s' if ranks != 1 else ''} ({sum(each.size for each in waiting) / 1e6:.1f} MB) could not be "
        f"copied to {run} ({reason_of(error)}) and wait{'' if steps > 1 else 's'} in {', '.join(places)}, which is memory: "
        f"{remedy}, then `ddpdoctor analyze {run}` fetches {'them' if steps > 1 else 'it'}."
    )
