"""Saves the profiler's result and the flight recorder's entries, in a separate thread."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any, Callable

from ...rundir import FLIGHT_FILE, reason_of
from ...rundir.handover import RAW_FILE, TooLargeError, raw_folder
from ...rundir.spool import spools_in
from ..guard import error_line, part
from ..job import backend_of
from ..patching import guarded
from ..recording import Session

_PART = part("profiler window")
STAGGER_S = 0.25
"""Seconds between the starts of a host's ranks, so that they do not all write at once. Saving a trace takes about that long."""
MOST_STAGGER_S = 4.0
"""Longest such wait, s. A job may end soon after its window."""
COMPRESSION = 20
"""Compression ratio of a trace, estimated on the large side; 8 to 17 for the project's own and the public traces."""


class TraceJob:
    """Saves the trace of one window, and queues it for compression into the run directory."""

    def __init__(
        self,
        session: Session,
        result: Any,
        max_bytes: int,
        report: Callable[..., None],
        expected_bytes: int,
        number: int = 0,
    ) -> None:
        """``report(state, why)`` is called on failure. ``expected_bytes`` is the expected size of the compressed trace, ``number``
        that of the requested window (0: the first window). Call on the training thread."""
        self._number = number
        self._session = session
        self._result = result
        self._max_bytes = max_bytes
        self._expected_bytes = expected_bytes
        self._report = report
        self._header = _header(session)
        self.handed_over = False
        """Whether the trace was handed over for compression."""
        self._no_delay = threading.Event()
        self._thread = threading.Thread(target=guarded(_PART, self._run), name="ddpdoctor-trace", daemon=True)

    def start(self) -> None:
        """Start the thread that saves."""
        self._thread.start()

    def finish_until(self, deadline_s: float) -> None:
        """Save without further delay, at the job's end. Returns when that is done or at ``deadline_s``, monotonic."""
        self._no_delay.set()
        self._thread.join(timeout=max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        try:
            if not self._number:
                self._save_flight()
            local_rank = int(self._session.document.get("local_rank") or 0)
            self._no_delay.wait(min(STAGGER_S * local_rank, MOST_STAGGER_S))
            self._save_trace()
            self.handed_over = True
            self._session.writer.document_changed.set()
        except TooLargeError as error:
            self._report("skipped", str(error))
        except Exception as error:
            # If the job has ended without waiting, its folders may be removed already, and the recording says so.
            if self._session.document.get("ended_ns") is None:
                _report_failure(self._session, self._report, error)
        finally:
            self._result = None

    def _save_flight(self) -> None:
        try:
            data = flight_recorder()
            if data is not None:
                self._session.spool.keep(FLIGHT_FILE, data)
        except Exception as error:
            part("flight recorder").failed(error)

    def _save_trace(self) -> None:
        own = self._session.spool.rank_folder()
        folders = [tempfile.gettempdir(), *([own] if own else [])]
        base = folder_with_space(self._expected_bytes * COMPRESSION, folders, _ranks_on_host(self._session))
        with raw_folder(base, self._session.run_id) as folder:
            self._result.save(os.path.join(folder.place, RAW_FILE))
            self._result = None
            with folder.handing_over():
                self._session.spool.hand_over_trace(folder.path, self._header, self._max_bytes, self._number)


def folder_with_space(size: int, folders: Sequence[str], ranks: int) -> str:
    """The first of ``folders`` in which half of the free space suffices for ``size`` bytes per rank. The ``ranks`` of a host check
    at the same time and independently. Raises TooLargeError if there is none."""
    for folder in folders:
        storage = os.statvfs(folder)
        if storage.f_bavail * storage.f_frsize >= 2 * size * ranks:
            return folder
    each = f" for each of the {ranks} ranks of this host" if ranks > 1 else ""
    raise TooLargeError(
        f"neither {' nor '.join(folders)} has twice the {size // 1_000_000} MB free that the trace may take uncompressed"
        f"{each}"
    )


def _ranks_on_host(session: Session) -> int:
    """Number of ranks of the run on this host, each of which has a spool."""
    return max(1, min(len(spools_in(os.path.dirname(session.spool.directory))), session.world_size))


def _report_failure(session: Session, report: Callable[..., None], error: Exception) -> None:
    try:
        if isinstance(error, OSError):
            words = f"its trace could not be saved ({reason_of(error)})"
            _PART.failed(
                error, words, f"no profiler window of rank {session.rank}: {words}; the job goes on."
            )
            report("failed", words)
            return
        _PART.failed(error)
        report("failed", error_line(error))
    except Exception:
        pass


_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions of torch's flight recorders: NCCL's and, from torch 2.8 on, that of the other backends. They exist for any backend."""
_RELAXED = 2
"""cudaStreamCaptureModeRelaxed."""
_EMPTY = b'"pg_status":{}'
"""Contained in the JSON of a recorder without entries."""


def flight_recorder(collectives: bool = True) -> bytes | None:
    """The flight recorder's entries as JSON without stacks, or only its counters. None if this torch has no flight recorder."""
    from torch._C import _distributed_c10d as c10d

    if collectives:
        _allow_graph_captures()
    found = None
    for name in _RECORDERS:
        dump = getattr(c10d, name, None)
        if dump is not None and (found is None or _EMPTY in found):
            data = dump(includeCollectives=collectives, onlyActive=False)
            found = data.encode() if isinstance(data, str) else bytes(data)
    return found


def _allow_graph_captures() -> None:
    """Allow other threads to capture CUDA graphs during the dump. To list NCCL's collectives, torch queries their events, which by
    default would invalidate a capture."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
    except (AttributeError, OSError):
        pass  # the process has no symbols of the CUDA runtime


def _header(session: Session) -> dict[str, Any]:
    """The process groups, as torch.profiler writes them, and the identity of the recording."""
    info: dict[str, Any] = {"rank": session.rank, "world_size": session.world_size}
    try:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        if dist.is_initialized():
            info["backend"] = backend_of()
            configs = getattr(c10d, "_get_all_pg_configs", None)
            if configs is not None:
                info["pg_config"] = configs()
                info["pg_count"] = len(info["pg_config"])
    except Exception as error:
        part("process groups").failed(error)
    identity = {"rank": session.rank, "world_size": session.world_size, "host": session.document.get("host"), "pid": os.getpid(),
            "time_ns": time.time_ns(), "perf_counter_ns": time.perf_counter_ns()}  # fmt: skip
    return {"distributedInfo": info, "ddpdoctor": identity}
