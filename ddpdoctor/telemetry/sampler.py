"""The thread that samples GPUs, host and ranks into ``telemetry.jsonl``, one JSON line a sample.

Line kinds: a header (``schema``), samples (``gpus``), notes (``note``), a closing line (``closed``). Each is
one ``os.write`` to a file opened with ``O_APPEND``: it can be read at any time and after a ``kill -9``.
"""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ddpdoctor.rundir import TELEMETRY_FILE, TELEMETRY_SCHEMA, Note
from ddpdoctor.rundir.privacy import mask_text

from .host import HostSampler
from .nvml import NvmlSampler
from .processes import ProcessTreeSampler


class TelemetrySampler:
    """Samples this host every ``interval_s`` seconds on average into ``directory/telemetry.jsonl`` until ``stop()``. Intervals are random:
    even ones alias with even steps.

    ``rank_pids()``, called in the sampling thread, gives rank -> pid of this host's ranks as of now. The
    file's growth is bounded: whenever ``thin_after_samples`` samples or ``thin_after_bytes`` bytes have been
    written at one interval, it doubles. Errors become ``notes``; no method raises.
    """

    def __init__(
        self,
        directory: Path,
        *,
        interval_s: float = 1.0,
        rank_pids: Callable[[], Mapping[int, int]],
        host: str | None = None,
        thin_after_samples: int = 3600,
        thin_after_bytes: int = 8 << 20,
    ) -> None:
        self.notes: list[Note] = []
        self.samples = 0
        self._directory = directory
        self._interval_s = interval_s
        self._random = random.Random()
        self._rank_pids = rank_pids
        self._host = host or socket.gethostname()
        self._thin_after = (thin_after_samples, thin_after_bytes)
        self._written = [0, 0]
        self._handle = -1
        self._cpu_ns = 0
        self._stopping = threading.Event()
        # A daemon: NVML may hang on a broken GPU, which must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-telemetry", daemon=True)

    def start(self) -> None:
        """Start sampling and return at once; NVML is opened in the thread, as that may take seconds."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self.notes.append(Note(f"No telemetry: its thread cannot be started: {error}."))

    def stop(self, timeout_s: float = 5.0) -> None:
        """Take a last sample, write the closing line, wait for the thread ``timeout_s`` seconds at most."""
        self._stopping.set()
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.notes.append(
                Note(f"Telemetry did not end within {timeout_s:g} s; its last samples may be missing.")
            )

    def pause_s(self) -> float:
        """Time to the next sample: random, from half to one and a half times the interval."""
        return self._interval_s * (0.5 + self._random.random())

    def _run(self) -> None:
        path = self._directory / TELEMETRY_FILE
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._handle = os.open(path, flags, 0o644)
            self._sample_until_stopped()
        except Exception as error:
            self.notes.append(Note(f"Telemetry stopped after {self.samples} samples: {path}: {error}."))
        finally:
            if self._handle >= 0:
                os.close(self._handle)

    def _sample_until_stopped(self) -> None:
        gpus, host, ranks = NvmlSampler(), HostSampler(), ProcessTreeSampler(self._rank_pids)
        try:
            header = {"schema": TELEMETRY_SCHEMA, "host": self._host, "started_ns": time.time_ns()}
            header |= {"interval_s": self._interval_s, "gpus": gpus.static, "host_facts": host.facts}
            self._write(header)
            due_s = time.monotonic()
            while True:
                stopping = self._stopping.wait(max(0.0, due_s - time.monotonic()))
                self._take(gpus, host, ranks, final=stopping)
                if stopping:
                    break
                # Samples that became due during a slow one are skipped.
                due_s = max(due_s + self.pause_s(), time.monotonic())
            cpu_ms = self._cpu_ns / 1e6 / self.samples
            closing = {"closed": True, "samples": self.samples, "cpu_ms_per_sample": round(cpu_ms, 3)}
            self._write({"t_ns": time.time_ns(), **closing})
        finally:
            gpus.close()

    def _take(self, gpus: NvmlSampler, host: HostSampler, ranks: ProcessTreeSampler, *, final: bool) -> None:
        began_ns, t_ns = time.thread_time_ns(), time.time_ns()
        sample = {
            "t_ns": t_ns,
            "host": host.sample(),
            "ranks": ranks.sample(),
            "gpus": gpus.sample(),
        }
        if final:
            sample["final"] = True
        written = self._write(sample)
        for source in (gpus, host, ranks):
            for note in source.notes:
                self._write_note(t_ns, note)
            self.notes.extend(source.notes)
            source.notes.clear()
        self.samples += 1
        self._written[0] += 1
        self._written[1] += written
        if any(count >= limit for count, limit in zip(self._written, self._thin_after)):
            self._thin(t_ns)
        self._cpu_ns += time.thread_time_ns() - began_ns

    def _thin(self, t_ns: int) -> None:
        self._interval_s *= 2
        self._written = [0, 0]
        note = Note(f"Sampling every {self._interval_s:g} s from here on, to bound the size of this file.")
        self._write_note(t_ns, note, interval_s=self._interval_s)

    def _write_note(self, t_ns: int, note: Note, **more: float) -> None:
        self._write({"t_ns": t_ns, "note": mask_text(note.text), "code": note.code.value, **more})

    def _write(self, document: Mapping[str, object]) -> int:
        """Append one line. Raises OSError where the disk is full or the file is gone."""
        if os.fstat(self._handle).st_nlink == 0:
            raise FileNotFoundError("the file has been removed")
        line = json.dumps(document, separators=(",", ":"), default=str).encode() + b"\n"
        if os.write(self._handle, line) != len(line):
            raise OSError("a line was written in part only; the disk is probably full")
        return len(line)
