"""Whether a job may be ended: by two looks that account for each rank, and nothing that speaks against it."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.launch import hang_detection, hang_monitor
from ddpdoctor.launch.hang_detection import ProgressTracker, Tuning
from ddpdoctor.launch.hang_monitor import HangMonitor
from ddpdoctor.launch.helper import AnalysisProcess
from ddpdoctor.launch.options import RunOptions
from ddpdoctor.launch.rankwatch import HostWatchedRanks, WatchedRank
from ddpdoctor.rundir import STALL_FILE
from ddpdoctor.rundir.host_files import host_document, keep_host_document
from ddpdoctor.rundir.layout import ENDS_FILE
from ddpdoctor.rundir.liveness import started
from ddpdoctor.rundir.stops import STALL_SCHEMA
from tests.waiting import until

from .test_standstill import a_rank, silent, waiting


def doubts(*ranks: WatchedRank, answered: bool = True) -> list[str]:
    return hang_detection.find_doubts(ranks, lambda rank: answered)


def busy() -> WatchedRank:
    rank = a_rank(1)
    rank.meter.cores = 1.0
    return rank


def moving() -> WatchedRank:
    rank = a_rank(1)
    rank.meter.works = True
    return rank


def silent_one() -> WatchedRank:
    rank = a_rank(1)
    rank.heard_s = 0.0
    return rank


def in_storage() -> WatchedRank:
    rank = a_rank(1)
    rank.state = "D"
    return rank


def stopped() -> WatchedRank:
    rank = a_rank(1)
    rank.state = "T"
    return rank


def without_a_page() -> WatchedRank:
    rank = a_rank(1)
    rank.beat = None
    return rank


def test_one_in_a_lock_for_whom_another_waits() -> None:
    assert doubts(waiting(0), a_rank(1)) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (busy, "uses a processor"),
        (moving, "reads, writes or computes"),
        (silent_one, "does not show"),
        (without_a_page, "does not show"),
        (stopped, "is stopped"),
        (in_storage, "waits for storage"),
    ],
)
def test_what_speaks_against_it(other, words: str) -> None:
    found = doubts(waiting(0), other())
    assert len(found) == 1 and found[0].startswith("rank 1 ") and words in found[0]


def test_who_was_asked_and_has_not_answered_is_not_proven() -> None:
    assert len(doubts(waiting(0), a_rank(1), answered=False)) == 2


def test_one_that_waits_and_uploads_is_not_ended() -> None:
    uploads = waiting(0)
    uploads.meter.works = True
    assert doubts(uploads, a_rank(1)) != []


def test_python_whose_lock_is_kept_speaks_through_faulthandler() -> None:
    keeps = silent_one()
    keeps._faults = "Stack (most recent call first):\n"
    assert doubts(waiting(0), keeps) == []
    keeps.meter.cores = 1.0  # sorting a long list, or a loop without an end
    assert doubts(waiting(0), keeps) == ["rank 1 uses a processor"]


def test_two_looks_a_while_apart_at_the_same_lines() -> None:
    ranks = [waiting(0), a_rank(1)]
    kill = hang_detection.KillDecision(0.0)
    assert not kill.evaluate([], ranks) and kill.evaluate([], ranks)
    kill = hang_detection.KillDecision(0.0)
    assert [kill.evaluate(found, ranks) for found in ([], ["rank 1 works"], [], [])] == [
        False,
        False,
        False,
        True,
    ]
    kill = hang_detection.KillDecision(0.0)
    kill.evaluate([], ranks)
    ranks[1].progress["user"] = [["train.py", 7, "main"]]
    assert not kill.evaluate([], ranks) and kill.evaluate([], ranks)


def test_no_look_before_its_time_or_while_the_report_is_written() -> None:
    kill = hang_detection.KillDecision(30.0)
    assert not kill.is_due(being_diagnosed=False)
    soon = hang_detection.KillDecision(0.0)
    assert soon.is_due(being_diagnosed=False) and not soon.is_due(being_diagnosed=True)


class Watching:
    """The process that watches a host's ranks, by turns that are taken by hand."""

    def __init__(self, tmp_path: Path, ranks: list[WatchedRank], on_hang: str = "kill", **more: Any) -> None:
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.root = tmp_path / "root"
        self.root.mkdir(mode=0o700, exist_ok=True)
        options = RunOptions(hang_after_s=3.0, on_hang=on_hang)
        self.watch = HangMonitor(self.root, "host", options, more.get("diagnose"), -1, writer)
        self.watch._current = lambda: ranks  # type: ignore[method-assign]

    def hangs(self, seconds: float = 60.0, answered: bool = True) -> None:
        """No rank has shown anything for so long."""
        progress = self.watch._progress
        progress.update(0.0, True, self.watch._current())
        silent(progress, self.watch._current(), 0.0, seconds)
        self.watch._has_answered = lambda rank: answered  # type: ignore[method-assign]

    def said(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in os.read(self.reader, 1 << 16).splitlines()]
        except BlockingIOError:
            return []

    def warnings(self) -> str:
        return "".join(said.get("warn", "") for said in self.said())


@pytest.mark.parametrize(
    ("document", "on_hang", "ends"),
    [
        ({}, "kill", True),
        ({}, "report", False),
        ({"state": "lasts"}, "kill", False),
        ({"looked_ns": 1}, "kill", False),
    ],
    ids=["ended there", "this one was not asked to", "it lasts", "before this launcher was started"],
)
def test_each_launcher_of_a_host_ends_its_own_ranks_once_one_has_found_that_they_hang(
    tmp_path, document, on_hang: str, ends: bool
) -> None:
    """With one launcher for each rank, the one that watches is as a rule a victim's."""
    watching = Watching(tmp_path, [], on_hang)
    stall = {
        "schema": STALL_SCHEMA,
        "host": "host",
        "state": "killed",
        "looked_ns": time.time_ns(),
        **document,
    }
    keep_host_document(str(watching.root), STALL_FILE, stall)
    watching.watch._poll()
    watching.watch._poll()
    assert [said.get("end_job", False) for said in watching.said()] == [True] * ends


def test_what_is_written_of_a_hang_is_brought_up_to_date_now_and_then(tmp_path, monkeypatch) -> None:
    watching = Watching(tmp_path, [waiting(0), a_rank(1)], "report")
    watching.hangs()
    looked_ns = []
    for again_s in (60.0, 60.0, 60.0, 0.0):
        monkeypatch.setattr(hang_monitor, "_UPDATE_PERIOD_S", again_s)
        watching.watch._poll()
        looked_ns.append(host_document(str(watching.root), STALL_FILE).get("looked_ns"))
    assert looked_ns[0] is None and looked_ns[1] == looked_ns[2] < looked_ns[3]


def test_who_is_left_of_dead_ranks_and_not_known_to_wait_for_them_is_not_ended(tmp_path) -> None:
    dead = a_rank(1)
    dead.end = {"signal": 9, "code": None, "in_order": False}
    watching = Watching(tmp_path, [a_rank(0), dead])
    watching.hangs(seconds=301.0)
    watching.watch._poll()
    watching.watch._poll()
    told = watching.warnings()
    assert "the job seems to hang" in told and "was ended by signal 9" in told
    assert "the job is not ended: a rank has died, and no other is known to wait for it" in told
    assert watching.watch._kill is None and watching.watch._stall is not None


def test_who_began_while_a_killed_job_was_ending_is_not_ended_with_it(tmp_path) -> None:
    """A retry of one rank's launcher may start while another's ranks take their time to end."""
    watching = Watching(tmp_path, [])
    killed = {"state": "killed", "looked_ns": time.time_ns(), "silent_since_ns": 0}
    watching.watch._stall = {"schema": STALL_SCHEMA, "host": "host", **killed}
    keep_host_document(str(watching.root), STALL_FILE, watching.watch._stall)
    retry = Watching(tmp_path, [])
    watching.watch._finish()
    retry.watch._poll()
    assert retry.said() == []
    assert host_document(str(watching.root), STALL_FILE)["looked_ns"] == killed["looked_ns"]


def test_nobody_ends_a_job_whose_launcher_was_killed_and_none_says_so(tmp_path, monkeypatch) -> None:
    """There is nobody to do it, and other launchers of the host would take it for an order."""
    monkeypatch.setattr(hang_monitor, "_AFTER_LAUNCHER_S", 0.1)
    watch = Watching(tmp_path, []).watch
    watch._orders, launcher = os.pipe()
    watch._kill, watch._ranks.known = hang_detection.KillDecision(0.0), {"spool": a_rank(1)}
    seen = []
    monkeypatch.setattr(watch, "_poll", lambda: seen.append((watch._options.on_hang, watch._kill)))
    monkeypatch.setattr(watch._ranks, "wait", lambda *_: time.sleep(0.02))
    monkeypatch.setattr(watch, "_finish", lambda: None)
    os.close(launcher)
    watch.run()
    assert seen and set(seen) == {("report", None)}


def elsewhere(rank: WatchedRank) -> WatchedRank:
    rank.progress["world_size"] = 4
    return rank


def test_where_all_wait_for_other_hosts_it_is_said_who_has_to_end_the_job(tmp_path) -> None:
    watching = Watching(tmp_path, [elsewhere(waiting(0)), elsewhere(waiting(1))])
    watching.hangs()
    watching.watch._poll()
    watching.watch._poll()
    told = watching.warnings()
    assert "all ranks wait for others" in told
    assert (
        "the job is not ended: all ranks of this host wait for ranks of other hosts; end the rank that they wait for there"
        in told
    )


def test_one_that_computes_while_other_hosts_may_wait_for_it_is_told_there(tmp_path) -> None:
    spins = elsewhere(busy())
    spins.progress["user"] = [["/job/train.py", 7, "main"]]
    watching = Watching(tmp_path, [spins])
    watching.hangs()
    for _ in range(3):
        watching.watch._poll()
    told = watching.warnings()
    assert told.count("no rank of this host has finished a step for") == 1
    assert "rank 1 (process" in told and "train.py:7 (main)" in told and "other hosts may wait for it" in told
    assert watching.watch._stall is None, "nobody knows that it hangs"


def test_while_steps_are_finished_nothing_is_said_or_asked_of_ranks_that_compute(tmp_path) -> None:
    """Of two hosts, in steps that take longer than a poll."""
    watching = Watching(tmp_path, [elsewhere(a_rank(0)), elsewhere(busy())])
    asked: list[WatchedRank] = []
    watching.watch._request_position = asked.append  # type: ignore[method-assign]
    watching.watch._update_ranks = lambda: True  # type: ignore[method-assign]
    for _ in range(3):
        watching.watch._poll()
    assert not watching.warnings() and not asked


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="needs Linux's /proc")
def test_where_memory_runs_out_the_analysis_of_a_job_that_runs_goes_first() -> None:
    diagnosing = AnalysisProcess(lambda: Path("/proc/self/oom_score_adj").read_text().strip())
    diagnosing.start()
    assert until(diagnosing.sentence, within_s=20) == "1000"


def test_the_second_hang_is_analysed_though_the_first_ones_analysis_goes_on(tmp_path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()

    def diagnose() -> str:
        (marks / str(os.getpid())).touch()
        time.sleep(60)
        return ""

    diagnosing = AnalysisProcess(diagnose)
    for number in (1, 2):
        diagnosing.start()
        until(lambda number=number: len(list(marks.iterdir())) == number, within_s=20)
    first, second = sorted(marks.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    until(lambda: not started(int(first.name)), within_s=20)
    assert started(int(second.name))
    diagnosing.abandon()


def found(number: int, began_ns: int, died_ns: int | None = None) -> WatchedRank:
    rank = WatchedRank(f"{number}-{began_ns}", number, began_ns)
    rank.began_ns = began_ns
    if died_ns is not None:
        rank.end = {"seen_ns": died_ns, "in_order": False, "signal": 9, "code": None}
    return rank


def numbers(*ranks: WatchedRank, started_ns: int = 0) -> list[tuple[int, bool]]:
    host = HostWatchedRanks(str(Path("/nonexistent")))
    host.known = {rank.spool: rank for rank in ranks}
    return [(rank.rank, rank.alive) for rank in host.current(started_ns)]


def test_what_becomes_known_later_of_an_end_is_written(tmp_path) -> None:
    """The last heartbeat is read after the process has ended."""
    watching, rank = Watching(tmp_path, []), a_rank(1)
    rank.note_end()
    watching.watch._ranks.known = {"spool": rank}
    for steps in (30, 31):
        rank.steps = steps
        watching.watch._poll()
        (end,) = host_document(str(watching.root), ENDS_FILE)["ends"]
        assert end["step"] == steps


def test_deaths_of_an_earlier_attempt_are_not_of_this_one() -> None:
    before = [found(0, 10, 50), found(1, 11, 50), found(2, 12, 49)]
    again = [found(0, 70), found(1, 71)]
    assert numbers(*before, *again) == [(0, True), (1, True)]
    # While they are started anew, and have not joined yet.
    assert numbers(*before, started_ns=60) == []
    # Of this attempt a dead rank counts.
    assert numbers(*before, found(0, 70), found(1, 71, 90)) == [(0, True), (1, False)]


def test_a_restart_has_its_startup_time_again() -> None:
    """The first step of each attempt builds the model anew."""
    progress = ProgressTracker(10.0, Tuning())
    first = [a_rank(0), a_rank(1)]
    progress.update(0.0, True, first)
    now_s = silent(progress, first, 0.0, 5)
    again = [waiting(0), a_rank(1)]
    for rank in again:
        rank.pid += 10
        rank.steps = 0
    again[1].meter.cores = 1.0
    now_s = silent(progress, again, now_s, 40)
    assert progress.hang_candidate(again) is None
    silent(progress, again, now_s, 25)
    assert progress.hang_candidate(again) is not None


def test_a_prompt_is_nobodys_hang() -> None:
    asks = a_rank(1, "debugger")
    progress = ProgressTracker(10.0, Tuning())
    progress.update(0.0, True, [waiting(0), asks])
    silent(progress, [waiting(0), asks], 0.0, 1000)
    assert progress.hang_candidate([waiting(0), asks]) is None
    assert math.isinf(asks.heard_s or 0.0)


def test_no_job_is_ended_by_what_somebody_else_may_have_written(tmp_path) -> None:
    """Where the folder of the spools was removed, anybody may make one of its name in /dev/shm, with a link in it."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir(mode=0o700)
    theirs.mkdir(mode=0o777)
    theirs.chmod(0o777)
    for folder in (ours, theirs):
        (folder / STALL_FILE).write_text('{"state": "killed"}')
    assert host_document(str(ours), STALL_FILE) == {"state": "killed"}
    assert host_document(str(theirs), STALL_FILE) == {}
    (ours / STALL_FILE).unlink()
    (ours / STALL_FILE).symlink_to(theirs / STALL_FILE)
    assert host_document(str(ours), STALL_FILE) == {}
    assert host_document(str(tmp_path / "none"), STALL_FILE) == {}
