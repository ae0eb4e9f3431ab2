"""Jobs that stop, and jobs that only seem to, under ``ddpdoctor run``: real ranks, and a time after which they hang of seconds."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor import analyze
from ddpdoctor.rundir.stops import RankStop, Stops, read_stops
from tests.hook.recording import JOBS, Recorded, forked
from tests.python import NEEDS_STACKS
from tests.waiting import until

from .launched import run_under, running, steps_taken

JOB = str(JOBS / "stopping_ddp.py")
SAID = "the job seems to hang"
AFTER = ("--hang-after", "3", "--no-profile")


def stopping(
    tmp: Path, how: str, *options: str, for_s: float = 12.0, ranks: int = 2
) -> tuple[Recorded, Stops]:
    command = forked(JOB, "--how", how, "--for-s", str(for_s), ranks=ranks)
    recorded = run_under(tmp, command, *AFTER, *options)
    notes: list[Any] = []
    stops = read_stops(str(recorded.run), notes)
    assert not notes, notes
    return recorded, stops


def of_rank(stops: Stops, rank: int) -> RankStop:
    return next(found for found in stops.ranks if found.rank == rank)


def functions(frames: Any) -> list[str]:
    return [function for _, _, function in frames]


def said(recorded: Recorded) -> list[str]:
    return [line for line in recorded.process.stderr.splitlines() if line.startswith("ddpdoctor:")]


@pytest.mark.torchrun
@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        pytest.param("asleep_in_a_lock", 3, marks=pytest.mark.slow),
        pytest.param("in_a_loop", 2, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_stops_in_python(tmp_path, how: str, ranks: int) -> None:
    recorded, stops = stopping(tmp_path, how, ranks=ranks)
    assert (recorded.process.returncode, recorded.process.stdout) == (0, "took 60 steps\n")
    told = said(recorded)
    assert SAID in told[0] and "rank 1 " in told[1] and f"({how})" in told[1] and "step 30" in told[1]
    (host,) = stops.hosts
    assert host.stall is not None and host.stall["state"] == "resumed"
    assert [(each["rank"], each["waits"], each["answered"]) for each in host.stall["ranks"]] == [
        (rank, rank != 1, True) for rank in range(ranks)
    ]
    standing = of_rank(stops, 1).standing
    assert standing is not None and how in functions(standing["user"]) and standing["step"] == 30
    assert of_rank(stops, 0).standing["phase"] == "backward"
    enqueued, _, completed = of_rank(stops, 0).standing["groups"]["0"]
    assert enqueued == completed + 1 == standing["groups"]["0"][0] + 1
    assert of_rank(stops, 0).flight is not None
    assert {end["code"] for end in host.ends["ends"]} == {0}


@NEEDS_STACKS
@pytest.mark.torchrun
def test_a_rank_that_sleeps_while_another_waits_on_its_device_with_a_core(tmp_path) -> None:
    """The waiting rank's host is in a later step, in forward, and uses a core: only NCCL's counts show that it waits."""
    recorded, stops = stopping(tmp_path, "behind_a_device", "--on-hang", "kill")
    told = said(recorded)
    assert (
        SAID in told[0]
        and "rank 1 " in told[1]
        and "(asleep_in_a_lock)" in told[1]
        and "rank 0 waits" in told[1]
    )
    assert any("the job is ended, as --on-hang kill asks" in line for line in told)
    (host,) = stops.hosts
    assert [(each["rank"], each["waits"]) for each in host.stall["ranks"]] == [(0, True), (1, False)]
    assert of_rank(stops, 0).standing["phase"] == "forward"
    finding = analyze([str(recorded.run)]).findings[0]
    assert (finding.rule, finding.ranks) == ("hang/not-reached", [1])


@pytest.mark.torchrun
@pytest.mark.extended
def test_a_rank_that_keeps_pythons_lock_in_c(tmp_path) -> None:
    """The report is there while it hangs, and the job ended as asked."""
    recorded, stops = stopping(tmp_path, "in_c_with_the_lock", "--on-hang", "kill")
    assert recorded.process.returncode != 0
    told = said(recorded)
    assert (
        SAID in told[0]
        and "rank 1 " in told[1]
        and "does not answer" in told[1]
        and "(in_c_with_the_lock)" in told[1]
    )
    assert stops.hosts[0].stall["state"] == "killed"
    guilty = of_rank(stops, 1)
    assert guilty.standing is None and "in in_c_with_the_lock" in guilty.faults
    assert {end["rank"]: end["signal"] for end in stops.hosts[0].ends["ends"]} == {0: 15, 1: 15}


@pytest.mark.torchrun
@pytest.mark.slow
def test_one_barrier_too_many(tmp_path) -> None:
    recorded, stops = stopping(tmp_path, "extra_barrier", "--on-hang", "kill")
    assert SAID in said(recorded)[0]
    assert {"extra_barrier"} <= set(functions(of_rank(stops, 1).standing["user"]))
    assert of_rank(stops, 1).standing["phase"] == "barrier"


@pytest.mark.torchrun
@pytest.mark.parametrize(
    ("how", "number"), [("killed", 9), pytest.param("segfault", 11, marks=pytest.mark.slow)]
)
def test_a_rank_that_dies(tmp_path, how: str, number: int) -> None:
    recorded, stops = stopping(tmp_path, how)
    assert recorded.process.returncode == 1 and SAID not in recorded.process.stderr
    manifest = json.loads((recorded.run / "manifest.json").read_text())
    assert manifest["exit_code"] == 1 and manifest["ended_ns"]
    assert [step["step"] for step in recorded.steps(1)] == list(range(30))
    (host,) = stops.hosts
    end = next(end for end in host.ends["ends"] if end["rank"] == 1)
    assert (end["signal"], end["code"], end["in_order"], end["step"]) == (number, None, False, 30)
    guilty = of_rank(stops, 1)
    assert guilty.ending is None
    assert ("Segmentation fault" in guilty.faults and "in segfault" in guilty.faults) is (how == "segfault")


@pytest.mark.torchrun
@pytest.mark.parametrize("how", ["raising", pytest.param("raising_beside_a_thread", marks=pytest.mark.slow)])
def test_a_rank_that_raises(tmp_path, how: str) -> None:
    recorded, stops = stopping(tmp_path, how, for_s=6.0)
    assert recorded.process.returncode == 1
    ending = of_rank(stops, 1).ending
    assert ending is not None and ending["how"] == "exception" and ending["step"] == 30
    first, second = ending["raised"]
    assert (first["type"], second["type"], second["relation"]) == ("ValueError", "KeyError", "cause")
    assert first["frames"][0][2] == "raising" and "hidden" not in first["message"]
    assert "ValueError" in recorded.process.stderr


def hang_monitor_of(launcher: int) -> int:
    """The child of the launcher whose hang monitor holds the lock."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        try:
            handles = list(Path(f"/proc/{child}/fd").iterdir())
            if any(str(handle.readlink()).endswith("/hang-monitor") for handle in handles):
                return int(child)
        except OSError:
            continue
    return 0


@pytest.mark.torchrun
@pytest.mark.extended
@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP])
def test_a_hang_monitor_that_is_no_more(tmp_path, number: signal.Signals) -> None:
    """Nothing of the job depends on it: not its going on, nor its end."""
    with running(tmp_path, forked(JOB, "--steps", "80", "--step-s", "0.05"), *AFTER) as launcher:
        until(lambda: steps_taken(tmp_path / "run"), launcher)
        os.kill(until(lambda: hang_monitor_of(launcher.pid)), number)
        out, err = launcher.communicate(timeout=120)
    assert (launcher.returncode, out) == (0, "took 80 steps\n"), err
    assert "Traceback" not in err
    assert len(Recorded(None, tmp_path / "run").steps(1)) == 80  # type: ignore[arg-type]


def test_nobody_watches_where_nobody_wants_it(tmp_path) -> None:
    code = "import os; print(os.environ['DDPDOCTOR_HANG_AFTER_S'])"
    recorded = run_under(tmp_path, [sys.executable, "-c", code], "--hang-after", "0")
    assert recorded.process.stdout == "0\n"
