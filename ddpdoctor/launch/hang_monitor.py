"""The hang monitor: a process that watches whether the job makes progress, and how its ranks end.

It reads /proc and memory-backed files of the ranks, and writes to memory, so neither storage nor a rank that hangs can block it. If it is
killed or stopped, the job and the launcher continue.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpdoctor.hook.environment import DEFAULT_HANG_AFTER_S
from ddpdoctor.launch.hang_detection import (
    HangCandidate,
    KillDecision,
    ProgressTracker,
    Tuning,
    elsewhere_sentence,
    find_doubts,
    hang_sentences,
    since_last_step_s,
    uncounted_sentence,
    unknown_sentence,
    unseen_sentence,
)
from ddpdoctor.launch.helper import JOB_ENDED, AnalysisProcess, send
from ddpdoctor.launch.leftovers import running_ranks
from ddpdoctor.launch.options import RunOptions
from ddpdoctor.launch.rankwatch import Activity, HostWatchedRanks, WatchedRank, is_silent
from ddpdoctor.launch.unjoined import UnjoinedRank, UnjoinedRanks
from ddpdoctor.process import is_readable
from ddpdoctor.rundir.files import read_json
from ddpdoctor.rundir.host_files import HANG_MONITOR, HostLock, host_document, keep_host_document
from ddpdoctor.rundir.layout import ASKED_FILE, ENDS_FILE, STALL_FILE, STANDING_FILE
from ddpdoctor.rundir.liveness import boot_id
from ddpdoctor.rundir.requests import ask, new_request
from ddpdoctor.rundir.stops import ENDS_SCHEMA, STALL_SCHEMA, Standstill
from ddpdoctor.telemetry.procfs import process_document

PERIOD_S = 1.0
"""Time between two polls. A poll costs 0.2 ms per rank."""
_UNMETERED_PART, _MOST_UNMETERED_S = 0.25, 10.0
"""After a finished step, a rank's use of resources is read from this part of the time on after which a job may hang, and from this time on
at the latest: most steps end before. Readings of the last ten seconds decide."""
_UPDATE_PERIOD_S = 30.0
"""Time between two updates of ``stall.json`` during a hang."""
_RESUMED_AFTER_S = 3.0
"""Time after which progress other than a finished step ends a hang. A rank that is ended by a signal is gone sooner."""
_MOVES_DATA_AFTER_S = 20.0
"""The same if ranks only move data, which is counted over ten seconds: after a timeout, NCCL's watchdog writes a dump of torch's flight
recorder, once."""
END_S = 0.3
"""Time for this process to end after the job; five times as long unless it is blocked in the kernel."""
_AFTER_LAUNCHER_S = 60.0
"""Time for ranks to end after their launcher was killed."""


_HANDOVER_S = 3.0 * PERIOD_S
"""Time in which another hang monitor takes the lock that this one has released; it tries once per period."""


class HangMonitor:
    """Main loop of the hang monitor's process."""

    def __init__(
        self,
        root: Path,
        host: str,
        options: RunOptions,
        diagnose: Callable[[], str] | None,
        orders: int,
        writer: int,
    ) -> None:
        """``root``: folder of the ranks' spools. ``diagnose`` analyses the run during a hang, in another process; it returns a sentence
        for the user. ``orders``, ``writer``: see :data:`.helper.Work`."""
        self._root, self._options = str(root), options
        self._orders, self._writer = orders, writer
        self._head = {"host": host, "boot": boot_id()}
        self._lock = HostLock(self._root, HANG_MONITOR)
        unmetered_s = min(_MOST_UNMETERED_S, _UNMETERED_PART * (options.hang_after_s or DEFAULT_HANG_AFTER_S))
        self._ranks = HostWatchedRanks(self._root, unmetered_s)
        self._unjoined = UnjoinedRanks(self._root)
        self._progress = ProgressTracker(options.hang_after_s, Tuning())
        self._analysis = AnalysisProcess(diagnose)
        self._request = 0
        self._requested_s: float | None = None
        """When the ranks' positions were requested, monotonic seconds; None if no answer is pending."""
        self._has_requested_for_others = self._is_unknown_reported = False
        self._stall: dict[str, Any] | None = None
        """``stall.json`` of the present hang; None without one."""
        self._progress_s: float | None = None
        """When ranks first made progress in the present hang, monotonic seconds."""
        self._only_moves_data = True
        """Whether that progress consists only of ranks that move data."""
        self._written_s = self._yields_until_s = 0.0
        self._kill: KillDecision | None = None
        self._began_ns = time.time_ns()
        self._ended_by_another = False
        self._ends: dict[str, Any] = {}
        self._earlier_ends: dict[tuple[Any, Any], dict[str, Any]] | None = None
        """Ends that another launcher's hang monitor wrote before this one took over, by rank and process id."""

    def run(self) -> None:
        """Poll until the launcher reports the end of its job or, if it was killed, until its ranks are gone."""
        while not is_readable(self._orders, 0):
            self._ranks.wait(PERIOD_S, [self._orders, *self._analysis.handles, *self._unjoined.handles])
            self._poll()
        if os.read(self._orders, 1) != JOB_ENDED:
            # The launcher is gone and cannot end the job, so no document may say that the job was ended.
            self._options, self._kill = replace(self._options, on_hang="report"), None
            if self._stall is None:
                # This process has no launcher to show its messages, so another launcher's hang monitor takes over, if there is one.
                self._yields_until_s = time.monotonic() + _HANDOVER_S
                self._lock.release()
            deadline_s = time.monotonic() + _AFTER_LAUNCHER_S
            while time.monotonic() < deadline_s and any(rank.alive for rank in self._ranks.known.values()):
                self._ranks.wait(PERIOD_S, [])
                self._poll()
        self._finish()
        self._lock.release()

    def _poll(self) -> None:
        self._end_with_others()
        if time.monotonic() < self._yields_until_s or not self._lock.take():
            # Another launcher's hang monitor is responsible for this host. But an exit code is visible only if the pidfd was opened before
            # the process ended.
            self._ranks.find(self._unjoined.seen)
            self._unjoined.update([rank.pid for rank in self._ranks.known.values()])
            return
        stepped = self._update_ranks()
        current = self._current()
        self._progress.update(time.monotonic(), stepped, current)
        self._write_ends()
        if (sentence := self._analysis.sentence()) is not None:
            send(self._writer, warn=sentence)
        if self._options.hang_after_s == 0:
            return
        for rank in current:
            rank.ask_stack((self._options.hang_after_s or DEFAULT_HANG_AFTER_S) / 2)
        if self._stall is not None:
            self._follow_hang(self._stall, current, stepped)
        else:
            self._check_for_hang(current)

    def _update_ranks(self) -> bool:
        """Update all ranks of this host. Returns whether one of them has finished a step."""
        stepped = self._ranks.update(self._unjoined.seen)
        self._unjoined.update([rank.pid for rank in self._ranks.known.values()])
        return stepped

    def _end_with_others(self) -> None:
        """With ``--on-hang kill``, end this launcher's job if another launcher of this host has ended its own."""
        if self._options.on_hang != "kill" or self._stall is not None or self._ended_by_another:
            return
        stall = host_document(self._root, STALL_FILE)
        looked_ns = stall.get("looked_ns")
        killed = stall.get("state") == Standstill.KILLED.value
        if killed and isinstance(looked_ns, int) and looked_ns > self._began_ns:
            self._ended_by_another = True
            found = "another launcher of this host has found that all of its ranks hang"
            send(self._writer, warn=f"the job is ended, as --on-hang kill asks: {found}.", end_job=True)

    def _current(self) -> list[WatchedRank]:
        """The ranks of this host, before and after ``init_process_group``, sorted by rank."""
        joined = self._ranks.current(self._unjoined.newest_start_ns())
        if any(rank.steps for rank in joined):
            return joined  # once a job trains, all of its ranks have joined
        found = [*joined, *self._unjoined.current([rank.rank for rank in joined])]
        return sorted(found, key=lambda rank: rank.rank)

    def _check_for_hang(self, current: list[WatchedRank]) -> None:
        candidate = self._progress.hang_candidate(current)
        if candidate is None:
            self._requested_s = None
            self._is_unknown_reported = self._is_unknown_reported and not self._progress.progressed
            self._request_for_other_hosts(current)
        elif self._requested_s is None:
            self._request_positions(current)
        elif all(map(self._has_answered, candidate.waiting + candidate.blocking)) or is_silent(
            self._requested_s, time.monotonic()
        ):
            if unseen := self._without_torch(current):
                self._report_unknown(unseen_sentence(candidate, unseen))
            elif candidate.unknown:
                self._report_unknown(unknown_sentence(candidate, self._on_this_host(current)))
            else:
                self._requested_s = None
                self._report_hang(candidate, current)

    def _without_torch(self, current: list[WatchedRank]) -> int:
        """Number of ranks of this host that have a process and have not imported torch. Not read once all ranks have joined: every process
        of the host has to be read for it."""
        if not any(isinstance(rank, UnjoinedRank) for rank in current):
            return 0
        return len(running_ranks(self._root) - {rank.rank for rank in current})

    def _report_unknown(self, sentence: str) -> None:
        """Warn, once per silence, that it is unknown whether the job hangs. Nothing is written to the run directory."""
        if not self._is_unknown_reported:
            self._is_unknown_reported = True
            send(self._writer, warn=sentence)

    def _request_for_other_hosts(self, current: list[WatchedRank]) -> None:
        """Request positions, once per silence, if no rank of this host is known to wait. Ranks of other hosts may wait for this one, or a
        rank whose process uses CPU time may wait on its device."""
        self._has_requested_for_others = self._has_requested_for_others and not self._progress.progressed
        if self._has_requested_for_others or self._progress.progressed or not self._progress.is_long(current):
            return
        computing = [rank for rank in current if rank.alive and rank.activity is Activity.COMPUTES]
        idle = [rank for rank in current if rank.alive and rank.activity is Activity.IDLE]
        is_uncounted = bool(computing and idle) and not any(rank.counts_collectives for rank in current)
        if not (self._on_this_host(current) or is_uncounted):
            return
        self._has_requested_for_others = True
        self._request_positions(current)
        self._requested_s = None
        silent_s = since_last_step_s(current, self._progress.silent_s)
        if self._on_this_host(current) and computing:
            send(self._writer, warn=elsewhere_sentence(silent_s, computing))
        elif is_uncounted:
            send(self._writer, warn=uncounted_sentence(silent_s, [*idle, *computing]))

    def _request_positions(self, current: list[WatchedRank]) -> None:
        self._request, self._requested_s = new_request(), time.monotonic()
        for rank in current:
            if rank.alive:
                self._request_position(rank)

    def _request_position(self, rank: WatchedRank) -> None:
        if isinstance(rank, UnjoinedRank):
            rank.ask()
            return
        with suppress(OSError):  # the rank or its spool is gone
            ask(rank.spool, self._request)

    def _has_answered(self, rank: WatchedRank) -> bool:
        if not rank.alive or rank.holds_gil:
            return True
        if isinstance(rank, UnjoinedRank):
            return bool(rank.faults)
        document = read_json(str(Path(rank.spool) / STANDING_FILE), []) or {}
        return document.get("request") == self._request

    def _report_hang(self, candidate: HangCandidate, current: list[WatchedRank]) -> None:
        now_ns = time.time_ns()
        self._stall = {
            "schema": STALL_SCHEMA,
            **self._head,
            "state": Standstill.LASTS.value,
            "silent_since_ns": now_ns - int(candidate.silent_s * 1e9),
            "detected_ns": now_ns,
            "paused_in": None,
            "ranks": [self._rank_document(rank) for rank in current],
        }
        self._write_stall(self._stall)
        for sentence in hang_sentences(candidate, self._on_this_host(current)):
            send(self._writer, warn=sentence)
        self._analysis.start()
        if self._options.on_hang != "kill":
            return
        if why := self._reason_not_to_kill(candidate, current):
            send(self._writer, warn=f"the job is not ended: {why}.")
            return
        self._kill = KillDecision(candidate.after_s)
        self._kill.evaluate(self._doubts(current), current)

    def _reason_not_to_kill(self, candidate: HangCandidate, current: list[WatchedRank]) -> str | None:
        if not candidate.blocking and self._on_this_host(current):
            return (
                "all ranks of this host wait for ranks of other hosts; end the rank that they wait for there"
            )
        if not candidate.waiting and not all(rank.alive for rank in candidate.blocking):
            return "a rank has died, and no other is known to wait for it"
        return None

    def _doubts(self, current: list[WatchedRank]) -> list[str]:
        return find_doubts(current, self._has_answered, has_other_hosts=bool(self._on_this_host(current)))

    def _on_this_host(self, current: list[WatchedRank]) -> str:
        """Words for messages if other hosts have ranks of the job, too; else empty."""
        size = max((rank.world_size or 0 for rank in current), default=0)
        return " of this host" if size > len(current) else ""

    def _rank_document(self, rank: WatchedRank) -> dict[str, Any]:
        return {
            "rank": rank.rank,
            "pid": rank.pid,
            "answered": rank.alive and not rank.holds_gil and self._has_answered(rank),
            "in_order": rank.ended or bool(rank.end and rank.end["in_order"]),
            "waits": rank.waits,
            "computes": rank.computes,
            "phase": rank.phase or None,
            "step": rank.steps if rank.joined else None,
            "last_step_ns": rank.last_step_ns,
            "process": process_document(rank.here_pid, rank.reported("syscall"))
            if rank.alive and rank.here_pid
            else None,
            **({"joined": False, "faults": rank.faults} if isinstance(rank, UnjoinedRank) else {}),
        }

    def _follow_hang(self, stall: dict[str, Any], current: list[WatchedRank], stepped: bool) -> None:
        if stall["state"] == Standstill.KILLED.value:
            return  # the ranks are being ended
        if self._kill is not None and self._progress.progressed:
            self._kill.restart()
        if self._is_hang_over(stall, current, stepped):
            self._resume(stall)
        elif self._progress_s is not None:
            return  # the next polls show whether the job continues
        elif self._kill is not None and self._confirm_kill(self._kill, current):
            self._kill = None
            stall["state"] = Standstill.KILLED.value
            self._write_stall(stall)
            send(self._writer, warn="the job is ended, as --on-hang kill asks.", end_job=True)
        elif time.monotonic() - self._written_s > _UPDATE_PERIOD_S:
            # For ranks that have ended, the earlier rows are kept.
            before = {_key(row): row for row in stall["ranks"]}
            stall["ranks"] = [
                before[rank.key] if not rank.alive and rank.key in before else self._rank_document(rank)
                for rank in current
            ]
            self._write_stall(stall)

    def _is_hang_over(self, stall: dict[str, Any], current: list[WatchedRank], stepped: bool) -> bool:
        """Whether the hang is over: a step is finished, or ranks made other progress some seconds ago and have not been ended since. A rank
        that is ended by a signal runs its handlers and saves its records, which looks like progress."""
        now_s, progress = time.monotonic(), self._progress
        if progress.progressed and (
            self._progress_s is None or (self._only_moves_data and progress.reported_progress)
        ):
            self._progress_s, self._only_moves_data = now_s, not progress.reported_progress
        if self._is_being_ended(stall, current) or (self._only_moves_data and not progress.progressed):
            self._progress_s = None
        after_s = _MOVES_DATA_AFTER_S if self._only_moves_data else _RESUMED_AFTER_S
        return stepped or (self._progress_s is not None and now_s - self._progress_s >= after_s)

    def _is_being_ended(self, stall: dict[str, Any], current: list[WatchedRank]) -> bool:
        """Whether the job was asked to end since the hang was detected, or a rank has ended by a signal or with an error."""
        asked_ns = host_document(self._root, ASKED_FILE).get("at_ns")
        is_asked_to_end = isinstance(asked_ns, int) and asked_ns > stall["detected_ns"]
        return is_asked_to_end or not all(rank.alive or rank.ended_well for rank in current)

    def _had_resumed(self, stall: dict[str, Any], current: list[WatchedRank]) -> bool:
        """Whether the hang was over before the job ended: its ranks had made progress, or all ended without an error."""
        had_progress = self._progress_s is not None or (
            bool(current) and all(rank.ended_well for rank in current)
        )
        return had_progress and not self._is_being_ended(stall, current)

    def _resume(self, stall: dict[str, Any]) -> None:
        stall.update(state=Standstill.RESUMED.value, paused_in=self._progress.paused_in)
        self._write_stall(stall)
        self._stall = self._kill = self._requested_s = self._progress_s = None
        send(self._writer, warn=f"the job goes on, after {stall['silent_s']:.0f} s.")

    def _confirm_kill(self, kill: KillDecision, current: list[WatchedRank]) -> bool:
        """Whether a second poll, after a new request for positions, confirms the hang. The report is awaited first, because it shows more
        while the job still runs. False if no hang would be reported now: the ranks that still run may not wait for others."""
        if self._progress.hang_candidate(current) is None or not kill.is_due(bool(self._analysis.handles)):
            return False
        if self._requested_s is None:
            self._request_positions(current)
        if not (all(map(self._has_answered, current)) or is_silent(self._requested_s, time.monotonic())):
            return False
        self._requested_s = None
        doubts = self._doubts(current)
        if doubts and not kill.is_doubt_reported:
            kill.is_doubt_reported = True
            send(self._writer, warn=f"the job is not ended: {doubts[0]}.")
        return kill.evaluate(doubts, current)

    def _write_stall(self, stall: dict[str, Any]) -> None:
        now_ns = time.time_ns()
        stall["looked_ns"] = now_ns
        stall["silent_s"] = round((now_ns - stall["silent_since_ns"]) / 1e9, 3)
        self._written_s = time.monotonic()
        self._keep(STALL_FILE, stall)

    def _write_ends(self) -> None:
        unjoined = self._unjoined.ends([rank.rank for rank in self._ranks.known.values()])
        ends = self._ranks.ends(unjoined, self._unjoined.newest_start_ns())
        ends["ends"] = self._with_earlier_ends(ends["ends"])
        if ends["ends"] and ends != self._ends:
            self._ends = ends
            self._keep(ENDS_FILE, {"schema": ENDS_SCHEMA, **self._head, **ends})

    def _with_earlier_ends(self, ends: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Copies of ``ends``, which change later, with the exit codes that an earlier hang monitor wrote for processes that ended before
        this one started."""
        if self._earlier_ends is None:
            written = host_document(self._root, ENDS_FILE).get("ends")
            rows = written if isinstance(written, list) else []
            self._earlier_ends = {_key(row): row for row in rows if isinstance(row, dict) and "pid" in row}
        own = [end for end in ends if end["code"] is not None or end["signal"] is not None]
        found = {_key(end): end for end in ends} | self._earlier_ends | {_key(end): end for end in own}
        return [dict(row) for row in found.values()]

    def _keep(self, name: str, document: dict[str, Any]) -> None:
        with suppress(OSError):  # the memory-backed folder is full or gone
            keep_host_document(self._root, name, document)

    def _finish(self) -> None:
        self._update_ranks()
        if self._lock.take():
            self._write_ends()
            # The document of a killed job keeps its time, so that later launchers do not end their jobs because of it.
            if self._stall is not None and self._stall["state"] == Standstill.LASTS.value:
                had_resumed = self._had_resumed(self._stall, self._current())
                self._stall["state"] = (Standstill.RESUMED if had_resumed else Standstill.ENDED).value
                self._write_stall(self._stall)
        self._analysis.abandon()


def _key(row: dict[str, Any]) -> tuple[Any, Any]:
    """:attr:`.rankwatch.WatchedRank.key` of a row of ``stall.json`` or ``ends.json``."""
    return row.get("rank"), row["pid"]
