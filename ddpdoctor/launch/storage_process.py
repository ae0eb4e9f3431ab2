"""The storage process copies the ranks' records from memory to the run directory, and samples the host. While the job runs, no other
process of the launcher accesses storage."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.launch.helper import JOB_ENDED, POLL_S, HelperProcess, heartbeat_to, send
from ddpdoctor.launch.leftovers import HostRanks, drain_stale_spools, stale_roots
from ddpdoctor.launch.options import RunOptions
from ddpdoctor.process import is_readable
from ddpdoctor.rundir.compaction import DiskBudget, rank_budget
from ddpdoctor.rundir.draining import BusyError, drain
from ddpdoctor.rundir.files import read_json, reason_of
from ddpdoctor.rundir.host_files import METRICS_SERVER, HostLock, copy_host_documents, remove_root
from ddpdoctor.rundir.layout import RANK_FILE, TARGET_FILE, OtherRunError, host_directory
from ddpdoctor.rundir.liveness import is_over
from ddpdoctor.rundir.notes import Note
from ddpdoctor.rundir.owned import make_private_folder
from ddpdoctor.rundir.spool import spools_in

if TYPE_CHECKING:
    from ddpdoctor.telemetry.sampler import TelemetrySampler

PERIOD_S = 1.0
_PERIOD_SHARE, _MAX_PERIOD_S = 0.1, 5.0
"""Records are copied every second at first, later in intervals of this share of the job's age, up to this many seconds: a copy of eight
ranks takes 5 ms of CPU time."""
_SAMPLER_S = 2.0
"""Time for telemetry to end."""
_METRICS_START_S, _METRICS_STOP_S = 10.0, 1.0
_AFTER_LAUNCHER_S = 60.0
"""Time for ranks to end after their launcher was killed; torchrun's own timeout is 30 s."""
_STOPPING_S = 3.5
"""Time for telemetry and metrics to end; they take longer only if they are blocked."""
_OTHERS_S = 1.0
"""Time after the job's end to finish copying the records of earlier runs; the next run continues."""


class StorageProcess:
    """Main loop of the storage process."""

    def __init__(
        self, run: Path, root: Path, host: str, options: RunOptions, orders: int, writer: int
    ) -> None:
        """``root``: folder of the ranks' spools on this host. ``orders``, ``writer``: see :data:`.helper.Work`."""
        self._run, self._root, self._host, self._options = run, root, host, options
        self._orders, self._writer = orders, writer
        self._beat = heartbeat_to(writer, b"\n")
        self._lock = HostLock(str(root))
        self._budgets: dict[str, DiskBudget] = {}
        self._warned: set[str] = set()
        self._copied: dict[str, int] = {}
        self._is_sampling = False
        """Whether this process samples the host, or has tried to."""
        self._sampler: TelemetrySampler | None = None
        self._metrics: HelperProcess | None = None

    def _warn(self, sentence: str) -> None:
        send(self._writer, warn=sentence)

    def _note(self, *notes: Note) -> None:
        send(self._writer, notes=[(note.text, note.code.value) for note in notes])

    def run(self) -> None:
        """Copy records until the launcher reports the end of its job or, if it was killed, until its ranks are gone."""
        self._start_metrics()
        # The lock is taken early: ranks check at their start whether it is held.
        others = HelperProcess("others", lambda orders, writer: drain_stale_spools(self._root))
        self._is_sampling = self._lock.take()
        if self._is_sampling and stale_roots(self._root):
            with suppress(OSError):  # no further process is allowed; a later run copies them
                others.start()
        if not self._run_with_heartbeats(self._start):
            return
        began_s = copied_s = time.monotonic()
        while not is_readable(self._orders, PERIOD_S):
            self._beat()
            now_s = time.monotonic()
            if now_s - copied_s >= min(_PERIOD_SHARE * (now_s - began_s), _MAX_PERIOD_S):
                copied_s = now_s
                self._copy_records()
        if os.read(self._orders, 1) != JOB_ENDED:
            self._wait_for_ranks()
        self._run_with_heartbeats(self._stop)
        others.stop(_OTHERS_S)
        self._lock.release()

    def _run_with_heartbeats(self, work: Callable[[], None]) -> bool:
        """Call ``work`` in a thread and send heartbeats. False if it was abandoned, ``_STOPPING_S`` after the job's end."""
        thread = threading.Thread(target=work, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no further thread is allowed; records are still copied
            self._note(Note(f"No telemetry: {error}."))
            return True
        left_s = _STOPPING_S
        while thread.is_alive() and left_s > 0:
            thread.join(POLL_S)
            left_s -= POLL_S if is_readable(self._orders, 0) else 0
            self._beat()
        return not thread.is_alive()

    def _start_metrics(self) -> None:
        """With ``--prometheus``, start the process that serves metrics. Call before any thread starts, because it is forked."""
        if self._options.prometheus is None:
            return
        metrics = HelperProcess("metrics", self._serve)
        try:
            metrics.start()
            self._metrics = metrics
        except OSError as error:
            self._warn(
                f"--prometheus: no metrics, because no process can be started for them: {error.strerror}."
            )

    def _serve(self, orders: int, writer: int) -> None:
        lock = HostLock(str(self._root), METRICS_SERVER)
        if not lock.take():
            send(writer)
            while not lock.take():
                if is_readable(orders, PERIOD_S):
                    return
        from ddpdoctor.telemetry.prometheus import serve_metrics

        if self._options.prometheus is not None:
            serve_metrics(
                self._run, self._host, self._options.prometheus, orders, lambda text: send(writer, warn=text)
            )
        lock.release()

    def _start(self) -> None:
        if self._is_sampling:
            self._sample()
        said = {} if self._metrics is None else self._metrics.answer(_METRICS_START_S)
        if said.get("warn"):
            self._warn(said["warn"])

    def _sample(self) -> None:
        """Start sampling in a thread, unless ``--no-telemetry``. Called after the job's start, so that the imports do not delay it."""
        if not self._options.telemetry:
            return
        try:
            from ddpdoctor.telemetry.sampler import TelemetrySampler

            self._sampler = TelemetrySampler(
                Path(host_directory(str(self._run), self._host)),
                interval_s=self._options.telemetry_interval_s,
                rank_pids=HostRanks(self._run, self._host).pid_by_rank,
                host=self._host,
            )
            self._sampler.start()
        except Exception as error:
            self._note(Note(f"No telemetry: {type(error).__name__}: {error}."))

    def _stop(self) -> None:
        if self._metrics is not None:
            self._metrics.stop(_METRICS_STOP_S)
        if self._sampler is not None:
            self._sampler.stop(timeout_s=_SAMPLER_S)
            self._note(*self._sampler.notes)

    def _wait_for_ranks(self) -> None:
        deadline_s = time.monotonic() + _AFTER_LAUNCHER_S
        while time.monotonic() < deadline_s and (spools := spools_in(str(self._root))):
            self._copy_records()
            if all(is_over(spool) for spool in spools):
                break
            time.sleep(PERIOD_S)
        self._lock.release()
        remove_root(str(self._root))

    def _copy_records(self) -> None:
        try:
            make_private_folder(str(self._root))  # if it was removed
        except OSError:
            return
        if not self._lock.take():
            return  # another launcher's storage process copies the records of this host
        try:
            copy_host_documents(str(self._root), str(self._run), self._copied)
        except OSError as error:
            self._warn_once(error)
        active = [spool for spool in spools_in(str(self._root)) if not self._copy_spool(spool)]
        if active and not self._is_sampling:
            self._is_sampling = True  # the launcher that sampled has ended
            self._run_with_heartbeats(self._sample)

    def _copy_spool(self, spool: str) -> bool:
        """Copy what is new in a spool. Returns whether its rank has ended."""
        over = is_over(spool)
        try:
            target = drain(spool, remove=over, budget=self._budgets.get(spool), beat=self._beat)
            if spool not in self._budgets and (budget := self._budget(target)) is not None:
                self._budgets[spool] = budget
        except BusyError:
            return over
        except FileNotFoundError as error:
            if (Path(spool) / TARGET_FILE).exists():  # otherwise the spool is being created, or was removed
                self._warn_once(error)
        except OSError as error:
            self._warn_once(error)
        except Exception as error:
            self._note(Note(f"{spool}: {type(error).__name__}: {error}."))
        self._beat()
        return over

    def _warn_once(self, error: OSError) -> None:
        reason = "it holds another run by now" if isinstance(error, OtherRunError) else reason_of(error)
        if reason not in self._warned:
            self._warned.add(reason)
            self._warn(
                f"what the ranks of this host record cannot be written to {self._run} ({reason}); it waits in memory, and "
                "the job goes on."
            )

    def _budget(self, target: str) -> DiskBudget | None:
        """Size limit of a rank's step log; None until the rank has recorded the world size."""
        world_size = (read_json(str(Path(target) / RANK_FILE), []) or {}).get("world_size")
        return (
            DiskBudget(rank_budget(world_size), self._may_continue) if isinstance(world_size, int) else None
        )

    def _may_continue(self) -> bool:
        self._beat()
        return not is_readable(self._orders, 0)
