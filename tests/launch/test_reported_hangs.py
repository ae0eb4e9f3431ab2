"""A hang that has been reported: what ends it, what lasts, and what is written of it meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.launch import hang_detection, hang_monitor
from ddpdoctor.rundir import STALL_FILE
from ddpdoctor.rundir.host_files import host_document, keep_host_document
from ddpdoctor.rundir.layout import ASKED_FILE

from .test_proof import Watching, moving
from .test_standstill import a_rank, waiting

DONE_LATER = {"0": [37, -1, 37]}


class Hanging(Watching):
    """A job of three ranks of which rank 0 works silently while the others wait, with a clock of its own, once its hang is reported."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks = [a_rank(0), waiting(1), waiting(2)]
        super().__init__(tmp_path, self.ranks)
        self.now_s = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s, time_ns=time.time_ns)
        monkeypatch.setattr(hang_monitor, "time", clock)
        monkeypatch.setattr(hang_detection, "time", clock)
        self.hangs()
        self.polls(3)
        assert self.state() == "lasts" and self.watch._kill is not None

    def polls(self, many: int) -> None:
        for _ in range(many):
            self.watch._poll()
            self.now_s += 1.0

    def state(self) -> str | None:
        return host_document(str(self.root), STALL_FILE).get("state")

    def passes_the_barrier(self) -> None:
        for rank in self.ranks:
            rank.progress = {"phase": "other", "groups": DONE_LATER, "events": 1}
        self.polls(1)

    def ends(self, number: int, code: int | None = 0, signal: int | None = None) -> None:
        rank = self.ranks[number]
        rank.ended = in_order = signal is None
        how = {"code": code, "signal": signal, "in_order": in_order, "step": rank.steps}
        rank.end = {"rank": number, "pid": rank.pid, "seen_ns": time.time_ns(), "oom_kills": 0, **how}

    def is_killed(self) -> bool:
        return any(said.get("end_job") for said in self.said())


def test_who_uploads_while_the_others_have_ended_well_is_not_ended(tmp_path, monkeypatch) -> None:
    job = Hanging(tmp_path, monkeypatch)
    job.passes_the_barrier()
    job.ends(1)
    job.ends(2)
    job.ranks[0].ended = True
    job.polls(100)
    assert not job.is_killed() and job.state() == "resumed"


def test_who_uploads_while_another_has_ended_badly_is_not_ended(tmp_path, monkeypatch) -> None:
    """Once a rank has closed its process group, no other can wait for it."""
    job = Hanging(tmp_path, monkeypatch)
    job.passes_the_barrier()
    job.ends(1, code=3)
    job.ends(2)
    job.ranks[0].ended = True
    job.polls(100)
    assert not job.is_killed()


def test_a_hang_that_lasts_is_ended(tmp_path, monkeypatch) -> None:
    job = Hanging(tmp_path, monkeypatch)
    job.polls(20)
    assert job.is_killed() and job.state() == "killed"


@pytest.mark.parametrize(("polls", "state"), [(12, "lasts"), (25, "resumed")])
def test_a_rank_that_moves_data_for_a_moment_does_not_go_on(
    tmp_path, monkeypatch, polls: int, state: str
) -> None:
    """As NCCL's watchdog, which writes a record of a collective that has timed out; one that goes on writing may be at a checkpoint."""
    job = Hanging(tmp_path, monkeypatch)
    job.watch._kill = None
    job.ranks[0].meter.works = True
    job.polls(polls)
    job.ranks[0].meter.works = False
    job.polls(3)
    assert job.state() == state
    assert any("goes on" in said.get("warn", "") for said in job.said()) == (state == "resumed")


def test_what_a_rank_does_at_its_end_does_not_count_because_it_moved_data_before(
    tmp_path, monkeypatch
) -> None:
    """NCCL's watchdog writes its record and ends the rank some seconds later; other ranks notice that, and end as well."""
    job = Hanging(tmp_path, monkeypatch)
    job.watch._kill = None
    job.ranks[0].meter.works = True
    job.polls(6)
    job.passes_the_barrier()
    job.polls(1)
    job.ends(0, code=None, signal=6)
    job.polls(3)
    assert job.state() == "lasts" and not any("goes on" in said.get("warn", "") for said in job.said())


@pytest.mark.parametrize(
    ("moves", "ends", "is_asked", "state"),
    [
        (True, {}, False, "resumed"),
        (False, {}, False, "resumed"),
        (True, {}, True, "ended"),
        (True, {"code": 1}, False, "ended"),
        (True, {"code": None, "signal": 2}, False, "ended"),
        (False, {"code": None, "signal": 9}, False, "ended"),
    ],
)
def test_a_job_that_ends_well_soon_after_did_not_hang(
    tmp_path, monkeypatch, moves: bool, ends: dict[str, Any], is_asked: bool, state: str
) -> None:
    job = Hanging(tmp_path, monkeypatch)
    if is_asked:
        keep_host_document(str(job.root), ASKED_FILE, {"signal": 2, "at_ns": time.time_ns()})
    if moves:
        job.passes_the_barrier()
    for number in range(3):
        job.ends(number, **(ends if number == 1 else {}))
    job.watch._finish()
    assert job.state() == state


def test_ranks_of_two_containers_may_have_one_process_id(tmp_path, monkeypatch) -> None:
    """Each records the id that it has in its own namespace."""
    job = Hanging(tmp_path, monkeypatch)
    progress = job.watch._progress
    for rank in job.ranks:
        rank.pid = 7
    job.polls(1)
    silent_s = progress.silent_s
    job.polls(1)
    assert progress.silent_s > silent_s
    job.ranks[0].progress["events"] = 1
    job.polls(1)
    assert progress.silent_s == 0.0
    job.ranks[0].meter.works = True
    job.polls(1)
    assert progress.paused_in == "other"
    assert len(hang_detection.current_lines([a_rank(0), job.ranks[0], moving()])) == 3


def test_what_ranks_of_one_process_id_did_before_they_ended_is_kept(tmp_path, monkeypatch) -> None:
    job = Hanging(tmp_path, monkeypatch)
    for rank, row in zip(job.ranks, job.watch._stall["ranks"], strict=True):
        rank.pid = row["pid"] = 7
    job.ends(1, code=None, signal=9)
    job.ends(2, code=None, signal=9)
    monkeypatch.setattr(hang_monitor, "_UPDATE_PERIOD_S", 0.0)
    job.watch._kill = None
    job.polls(1)
    rows = host_document(str(job.root), STALL_FILE)["ranks"]
    assert [row["rank"] for row in rows] == [0, 1, 2]
