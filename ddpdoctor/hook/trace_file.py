"""Saving the profiler's result and the flight recorder, in a thread of its own."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Sequence

from ..rundir import FLIGHT_FILE, TRACE_FILE, reason_of, write_whole
from .guard import part, words_of
from .patching import guarded

if TYPE_CHECKING:
    from .session import Session

_PART = part("profiler window")
STAGGER_S = 0.25
"""Between the ranks of a host, which would otherwise all write at the same moment; at most
``MOST_STAGGER_S``.
"""
MOST_STAGGER_S = 4.0
LONGEST_WAIT_S = 60.0
"""For a trace still being written when the job ends."""
COMPRESSION = 20
"""A trace before by one after, about, on the large side: 8 to 17 on our own and the public ones."""
_CHUNK = 1 << 20


class TooLargeError(Exception):
    """The trace would take more than was allowed."""


class TraceJob:
    """Writes trace.json.gz and flight.json of one window."""

    def __init__(
        self,
        session: "Session",
        result: Any,
        max_bytes: int,
        report: Callable[..., None],
        expected_bytes: int,
    ) -> None:
        """``report(state, why, **fields)`` is called when all is written or has failed; ``expected_bytes``: of the
        compressed trace. Call on the training thread.
        """
        self._session = session
        self._result = result
        self._max_bytes = max_bytes
        self._expected_bytes = expected_bytes
        self._report = report
        self._header = _header(session)
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=guarded(_PART, self._run), name="ddpdoctor-trace", daemon=True)

    def start(self) -> None:
        """Start to write."""
        self._thread.start()

    def hurry_and_wait(self) -> None:
        """The job ends: write now, return once it is done."""
        self._hurry.set()
        self._thread.join(timeout=LONGEST_WAIT_S)

    def _run(self) -> None:
        try:
            self._session.refuse_other_run()
            self._save_flight()
            local_rank = int(self._session.document.get("local_rank") or 0)
            self._hurry.wait(min(STAGGER_S * local_rank, MOST_STAGGER_S))
            self._report("saved", None, bytes=self._save_trace())
        except TooLargeError as error:
            self._report("skipped", str(error))
        except Exception as error:
            _report_failure(self._session, self._report, error)
        finally:
            self._result = None

    def _save_flight(self) -> None:
        try:
            data = flight_recorder()
            if data is not None:
                write_whole(os.path.join(self._session.directory, FLIGHT_FILE), data)
        except OSError as error:
            words = (
                f"the flight record could not be written to {self._session.directory} ({reason_of(error)})"
            )
            part("flight recorder").failed(error, words, f"{words}; the job goes on.")
        except Exception as error:
            part("flight recorder").failed(error)

    def _save_trace(self) -> int:
        folder = _room_for(
            self._expected_bytes * COMPRESSION, (tempfile.gettempdir(), self._session.directory)
        )
        handle, raw = tempfile.mkstemp(prefix="ddpdoctor-", suffix=".json", dir=folder)
        os.close(handle)
        target = os.path.join(self._session.directory, TRACE_FILE)
        beside = target + ".tmp"
        try:
            self._result.save(raw)
            self._result = None
            size = _compress(raw, beside, self._header, self._max_bytes)
            os.replace(beside, target)
            return size
        finally:
            for path in (raw, beside):
                try:
                    os.unlink(path)
                except OSError:
                    pass


def _room_for(size: int, folders: Sequence[str]) -> str:
    """The first of ``folders`` half of whose free space holds ``size`` bytes. Raises TooLargeError."""
    for folder in folders:
        storage = os.statvfs(folder)
        if storage.f_bavail * storage.f_frsize >= 2 * size:
            return folder
    raise TooLargeError(
        f"neither {' nor '.join(folders)} has twice the {size // 1_000_000} MB free that the trace may take uncompressed"
    )


def _report_failure(session: "Session", report: Callable[..., None], error: Exception) -> None:
    try:
        if isinstance(error, OSError):
            words = f"its trace could not be written to {session.directory} ({reason_of(error)})"
            _PART.failed(
                error, words, f"no profiler window of rank {session.rank}: {words}; the job goes on."
            )
            report("failed", words)
            return
        _PART.failed(error)
        report("failed", words_of(error))
    except Exception:
        pass


def _compress(raw: str, target: str, header: Dict[str, Any], max_bytes: int) -> int:
    """Copy a trace, compressed, with ``header``'s members put first; its size in bytes. Raises TooLargeError,
    OSError, ValueError.
    """
    with open(raw, "rb") as source, open(target, "wb") as out:
        first = source.read(_CHUNK)
        brace = first.find(b"{")
        if brace < 0:
            raise ValueError("the profiler wrote no JSON object")
        with gzip.GzipFile("", "wb", 3, out) as packed:
            packed.write(b"{\n" + json.dumps(header)[1:-1].encode() + b",\n" + first[brace + 1 :])
            while True:
                chunk = source.read(_CHUNK)
                if not chunk:
                    break
                packed.write(chunk)
                if out.tell() > max_bytes:
                    raise TooLargeError(
                        f"the trace takes more than {max_bytes // 1_000_000} MB; see --max-trace-mb"
                    )
        return out.tell()


def flight_recorder() -> Optional[bytes]:
    """The flight recorder's entries as JSON, without stacks; None where this torch keeps none."""
    from torch._C import _distributed_c10d as c10d

    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            data = dump(includeCollectives=True, onlyActive=False)
            return data.encode() if isinstance(data, str) else bytes(data)
    return None


def _header(session: "Session") -> Dict[str, Any]:
    """What torch.profiler would say about the process groups, and who recorded this."""
    info: Dict[str, Any] = {"rank": session.rank, "world_size": session.world_size}
    try:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        if dist.is_initialized():
            info["backend"] = dist.get_backend()
            configs = getattr(c10d, "_get_all_pg_configs", None)
            if configs is not None:
                info["pg_config"] = configs()
                info["pg_count"] = len(info["pg_config"])
    except Exception as error:
        part("process groups").failed(error)
    ours = {"rank": session.rank, "world_size": session.world_size, "host": session.document.get("host"), "pid": os.getpid(),
            "time_ns": time.time_ns(), "perf_counter_ns": time.perf_counter_ns()}  # fmt: skip
    header: Dict[str, Any] = json.loads(json.dumps({"distributedInfo": info, "ddpdoctor": ours}, default=str))
    return header
