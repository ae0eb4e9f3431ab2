"""What is concluded of an end, and whether a process still runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from ddpdoctor.rundir.ends import Conclusion, Exit, JobEnd, RankEnd, conclude, exit_of, job_end
from ddpdoctor.rundir.liveness import boot_id, is_running, pid_namespace

FINE, BROKEN, OPEN = JobEnd(True, True, 0), JobEnd(True, True, 1), JobEnd()
WELL, FAILED, REQUESTED, UNKNOWN = Conclusion


@pytest.mark.parametrize("job", [FINE, BROKEN, OPEN])
@pytest.mark.parametrize("way", list(Exit))
@pytest.mark.parametrize("closed", [True, False])
def test_nothing_fails_by_a_single_witness(job: JobEnd, way: Exit, closed: bool) -> None:
    """And a rank that ended its recording in order, of a job that succeeded, never does without another rank's word."""
    found = conclude(RankEnd(way, closed), job)
    assert found is not FAILED
    if closed and job is FINE:
        assert found in (WELL, REQUESTED)


@pytest.mark.parametrize(
    ("way", "closed", "job", "conclusion"),
    [
        (Exit.ZERO, False, BROKEN, WELL),
        (Exit.OWN_CODE, True, BROKEN, FAILED),
        (Exit.CODE, False, BROKEN, FAILED),
        (Exit.CODE, True, BROKEN, UNKNOWN),
        (Exit.FORCE, True, BROKEN, FAILED),
        (Exit.FORCE, True, FINE, WELL),
        (Exit.FORCE, False, FINE, FAILED),
        (Exit.SAME_CODE, False, BROKEN, UNKNOWN),
        (Exit.SAME_CODE, True, FINE, WELL),
        (Exit.UNKNOWN, False, BROKEN, UNKNOWN),
    ],
)
def test_with_a_second_one(way: Exit, closed: bool, job: JobEnd, conclusion: Conclusion) -> None:
    assert conclude(RankEnd(way, closed, confirmed=True), job) is conclusion


def test_requests_and_exceptions() -> None:
    assert conclude(RankEnd(Exit.FORCE, False, requested=True, confirmed=True), BROKEN) is REQUESTED
    assert conclude(RankEnd(Exit.ZERO, True, requested=True), FINE) is WELL
    assert conclude(RankEnd(Exit.CODE, False, raised=True), FINE) is FAILED
    assert conclude(RankEnd(Exit.POLITE, False, confirmed=True), BROKEN) is REQUESTED
    assert conclude(RankEnd(Exit.POLITE, False, lost=True, confirmed=True), FINE) is FAILED


@pytest.mark.parametrize(
    ("code", "number", "left", "way"),
    [
        (0, None, True, Exit.ZERO),
        (3, None, True, Exit.OWN_CODE),
        (3, None, False, Exit.CODE),
        (143, None, True, Exit.POLITE),
        (None, 15, False, Exit.POLITE),
        (None, 9, False, Exit.FORCE),
        (None, None, True, Exit.UNKNOWN),
    ],
)
def test_ways_to_exit(code: int | None, number: int | None, left: bool, way: Exit) -> None:
    assert exit_of(code, number, left=left) is way


def test_the_end_of_a_job_with_several_launchers() -> None:
    own = {"host": "a", "pid": 1, "ended_ns": 5, "exit_code": 0}
    other = {"host": "b", "pid": 2, "ended_ns": 7, "exit_code": 3}
    assert job_end([own], [own]).succeeded
    assert job_end([own], [own, other]) == JobEnd(True, True, 3)
    running = {"host": "b", "pid": 2, "ended_ns": None}
    assert not job_end([own], [own, running]).succeeded and not job_end([own], [own, running]).failed
    twin = {**own, "pid_namespace": 2, "exit_code": 3}
    assert job_end([own], [own, twin]).code == 3, "both are process 1 of their container"
    assert job_end([{**own, "ended_ns": None}], [own]) == JobEnd()
    assert job_end([{}]) == JobEnd()
    early = {**other, "ended_ns": own["ended_ns"] - 1}
    assert job_end([own], [own, early], own["ended_ns"]).succeeded, "the job went on without that launcher"
    assert job_end([own], [own], own["ended_ns"] + 1).succeeded, "no other launcher is known"


def test_processes_that_run_and_that_do_not() -> None:
    here = {"host": os.uname().nodename, "boot": boot_id(), "pid_namespace": pid_namespace()}
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    document = {**here, "pid": child.pid, "started_ns": time.time_ns()}
    assert is_running(document)
    assert is_running({**document, "started_ns": time.time_ns() - 10**12}) is False, (
        "its number was used again"
    )
    for name, value in (("pid_namespace", 1), ("boot", "another"), ("host", "elsewhere"), ("pid", None)):
        assert is_running({**document, name: value}) is None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_running(document) is False, "a zombie"
    child.wait()
    assert is_running(document) is False
