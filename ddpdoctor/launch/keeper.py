"""The process beside the launcher that touches storage: it copies the ranks' records from memory to the run directory, and samples
the host."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.launch.helper import IN_ORDER, LOOK_S, Beside, beating, is_told_to_end, say
from ddpdoctor.launch.leftovers import HostRanks, drain_stale_spools, stale_roots
from ddpdoctor.launch.options import RunOptions
from ddpdoctor.rundir import (
    RANK_FILE,
    TARGET_FILE,
    BusyError,
    Carrier,
    DiskBudget,
    Note,
    NoteCode,
    OtherRunError,
    carry_host_documents,
    drain,
    host_directory,
    is_over,
    make_private_folder,
    rank_budget,
    read_json,
    reason_of,
    remove_root,
    spools_in,
)
from ddpdoctor.rundir.carrier import METRICS

if TYPE_CHECKING:
    from ddpdoctor.telemetry import TelemetrySampler


_STOP_S = 2.0
_METRICS_START_S, _METRICS_STOP_S = 10.0, 1.0
_LOOK_S = 1.0
"""Between two looks at whether another launcher still serves metrics."""


class HostWatch:
    """Starts and ends the host's telemetry sampler and what serves its metrics."""

    def __init__(self, run: Path, root: Path, host: str, ranks: HostRanks, options: RunOptions) -> None:
        """``root`` is where the ranks' spools lie on this host."""
        self._run, self._root = run, root
        self._directory = Path(host_directory(str(run), host))
        self._host, self._ranks, self._options = host, ranks, options
        self._sampler: TelemetrySampler | None = None
        self._metrics: Beside | None = None

    def start_process(self, warn: Callable[[str], None]) -> None:
        """Start the process that serves metrics, if they are asked for. To be called before there is any thread: it is forked."""
        if self._options.prometheus is None:
            return
        self._metrics = Beside("metrics", self._serve)
        try:
            self._metrics.start()
        except OSError as error:
            self._metrics = None
            warn(f"--prometheus: no metrics, because no process can be started for them: {error.strerror}.")

    def await_metrics(self, warn: Callable[[str], None]) -> None:
        """Wait for what the metrics have to say."""
        said = {} if self._metrics is None else self._metrics.answer(_METRICS_START_S)
        if said.get("warn"):
            warn(said["warn"])

    def sample(self) -> None:
        """Begin sampling, in a thread, if that is asked for. For when the job runs: what telemetry imports must not delay it."""
        if not self._options.telemetry:
            return
        from ddpdoctor.telemetry import TelemetrySampler

        self._sampler = TelemetrySampler(
            self._directory,
            interval_s=self._options.telemetry_interval_s,
            rank_pids=self._ranks.pid_by_rank,
            host=self._host,
        )
        self._sampler.start()

    def _serve(self, orders: int, writer: int) -> None:
        office = Carrier(str(self._root), METRICS)
        if not office.take():
            say(writer)
            while not office.take():
                if is_told_to_end(orders, _LOOK_S):
                    return
        from ddpdoctor.telemetry import serve_metrics

        if self._options.prometheus is not None:
            serve_metrics(
                self._run, self._host, self._options.prometheus, orders, lambda text: say(writer, warn=text)
            )
        office.release()

    def stop(self) -> list[Note]:
        """End serving and sampling; returns what went wrong."""
        if self._metrics is not None:
            self._metrics.stop(_METRICS_STOP_S)
        if self._sampler is not None:
            self._sampler.stop(timeout_s=_STOP_S)
        return [] if self._sampler is None else list(self._sampler.notes)


PERIOD_S = 1.0
_AFTER_LAUNCHER_S = 60.0
"""How long the ranks may take to end whose launcher was killed; torchrun gives them 30 s."""
_STOPPING_S = 3.5
"""More than telemetry and metrics take to end, unless they never do."""
_OTHERS_S = 1.0
"""How long the end of a job waits until what other runs left is copied; the next run goes on with it."""


class Keeper:
    """The launcher's side of it. For the main thread."""

    def __init__(self, run: Path, root: Path, watch: HostWatch) -> None:
        self._notes: list[Note] = []
        self._beside = Beside("keeper", lambda orders, writer: _Kept(run, root, watch, orders, writer).keep())

    def start(self) -> None:
        """Start the process. Raises OSError."""
        self._beside.start()

    def listen(self, warn: Callable[[str], None], patience_s: float) -> None:
        """What it has to say while the job runs goes to ``warn``."""

        def told(said: dict[str, Any]) -> None:
            if "warn" in said:
                warn(said["warn"])
            self._notes += [Note(text, NoteCode(code)) for text, code in said.get("notes", [])]

        self._beside.listen(told, patience_s)

    def end(self) -> list[Note]:
        """Have it bring what it does to an end. Returns what went wrong with the telemetry. Raises
        NoAnswerError where it does not get on: it is left behind then."""
        self._beside.end()
        return self._notes


class _Kept:
    """The process's own side."""

    def __init__(self, run: Path, root: Path, watch: HostWatch, orders: int, writer: int) -> None:
        self._run, self._root, self._watch = run, root, watch
        self._orders, self._writer = orders, writer
        self._beat = beating(writer, b"\n")
        self._carrier = Carrier(str(root))
        self._budgets: dict[str, DiskBudget] = {}
        self._told: set[str] = set()
        self._carried: dict[str, int] = {}
        self._samples = False
        """Whether the host is sampled here, or cannot be: by who carries its ranks' records."""

    def _say(self, **what: Any) -> None:
        say(self._writer, **what)

    def _note(self, *notes: Note) -> None:
        self._say(notes=[(note.text, note.code.value) for note in notes])

    def keep(self) -> None:
        """Until the launcher says that its job has ended, or, where it was killed, its ranks are gone."""
        self._watch.start_process(lambda sentence: self._say(warn=sentence))
        # Ranks look for a carrier as soon as they begin.
        others = Beside("others", lambda orders, writer: drain_stale_spools(self._root))
        self._samples = self._carrier.take()
        if self._samples and stale_roots(self._root):
            with suppress(OSError):  # no further process is allowed: another run does it
                others.start()
        if not self._do_beating(self._start):
            return
        while not self._is_told_to_end(PERIOD_S):
            self._carry()
        if os.read(self._orders, 1) != IN_ORDER:
            self._outlive()
        self._do_beating(self._stop)
        others.stop(_OTHERS_S)
        self._carrier.release()

    def _is_told_to_end(self, patience_s: float) -> bool:
        return is_told_to_end(self._orders, patience_s)

    def _do_beating(self, work: Callable[[], None]) -> bool:
        """Do ``work`` in a thread; False where it goes on for long after the job's end, and is left behind."""
        thread = threading.Thread(target=work, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # none is allowed any more: the recording is carried all the same
            self._note(Note(f"No telemetry: {error}."))
            return True
        left_s = _STOPPING_S
        while thread.is_alive() and left_s > 0:
            thread.join(LOOK_S)
            left_s -= LOOK_S if self._is_told_to_end(0) else 0
            self._beat()
        return not thread.is_alive()

    def _start(self) -> None:
        if self._samples:
            self._sample()
        self._watch.await_metrics(lambda sentence: self._say(warn=sentence))

    def _sample(self) -> None:
        try:
            self._watch.sample()
        except Exception as error:
            self._note(Note(f"No telemetry: {type(error).__name__}: {error}."))

    def _stop(self) -> None:
        self._note(*self._watch.stop())

    def _outlive(self) -> None:
        deadline_s = time.monotonic() + _AFTER_LAUNCHER_S
        while time.monotonic() < deadline_s and (spools := spools_in(str(self._root))):
            self._carry()
            if all(is_over(spool) for spool in spools):
                break
            time.sleep(PERIOD_S)
        self._carrier.release()
        remove_root(str(self._root))

    def _carry(self) -> None:
        try:
            make_private_folder(str(self._root))  # again, where somebody has removed it
        except OSError:
            return
        if not self._carrier.take():
            return  # another launcher of this host has one that does
        try:
            carry_host_documents(str(self._root), str(self._run), self._carried)
        except OSError as error:
            self._tell(error)
        goes_on = [spool for spool in spools_in(str(self._root)) if not self._carry_spool(spool)]
        if goes_on and not self._samples:
            self._samples = True  # the launcher of which this was has ended
            self._do_beating(self._sample)

    def _carry_spool(self, spool: str) -> bool:
        """Whether nothing more comes from it."""
        over = is_over(spool)
        try:
            target = drain(spool, remove=over, budget=self._budgets.get(spool), beat=self._beat)
            if spool not in self._budgets and (budget := self._budget(target)) is not None:
                self._budgets[spool] = budget
        except BusyError:
            return over
        except FileNotFoundError as error:
            if (Path(spool) / TARGET_FILE).exists():  # otherwise it is being made, or was removed
                self._tell(error)
        except OSError as error:
            self._tell(error)
        except Exception as error:
            self._note(Note(f"{spool}: {type(error).__name__}: {error}."))
        self._beat()
        return over

    def _tell(self, error: OSError) -> None:
        reason = "it holds another run by now" if isinstance(error, OtherRunError) else reason_of(error)
        if reason not in self._told:
            self._told.add(reason)
            self._say(
                warn=f"what the ranks of this host record cannot be written to {self._run} ({reason}); it waits in memory, and "
                "the job goes on."
            )

    def _budget(self, target: str) -> DiskBudget | None:
        """What the step log of a rank may take; None until the rank has said of how many it is one."""
        world_size = (read_json(str(Path(target) / RANK_FILE), []) or {}).get("world_size")
        return DiskBudget(rank_budget(world_size), self._may_go_on) if isinstance(world_size, int) else None

    def _may_go_on(self) -> bool:
        self._beat()
        return not self._is_told_to_end(0)
