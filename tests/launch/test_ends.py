"""Jobs that do not end well: what they recorded is there, their end is theirs, and nobody is left running."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from ddpdoctor.launch.leftovers import drain_spools
from ddpdoctor.rundir.liveness import started as is_alive
from ddpdoctor.rundir.reader import RunDirectory
from ddpdoctor.rundir.spool import make_spool_root
from tests.hook.recording import TORCHRUN, Recorded, forked, run_plain
from tests.waiting import until

from .launched import TINY, clean_environment, pids_of, run_under, running, steps_taken


def nobody_is_left(recorded: Recorded, ranks: int = 2) -> None:
    pids = [recorded.info(rank)["pid"] for rank in range(ranks)]
    until(lambda: not any(map(is_alive, pids)), within_s=10)
    assert not list(Path("/dev/shm").glob(f"ddpdoctor-{os.getuid()}-*/0000?-{pids[0]}"))


@pytest.mark.torchrun
@pytest.mark.extended
def test_a_restarted_attempt_has_a_recording_of_its_own(tmp_path) -> None:
    job = [TINY, "--steps", "40", "--fail-at", "7", "--attempts", "1"]
    # Else torch 2.13 lets the second attempt read the first one's addresses, now and then, with us or without.
    environment = clean_environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    command = [*TORCHRUN, "2", "--max-restarts", "1", *job]
    recorded = run_under(tmp_path, command, environment=environment, timeout_s=120)
    assert recorded.process.returncode == 0, recorded.process.stderr
    assert recorded.process.stdout == "took 40 steps\n"
    assert recorded.folders() == ["00000", "00000.1", "00001", "00001.1"]
    assert [recorded.info(1, repeat)["attempt"] for repeat in (0, 1)] == [0, 1]
    assert [len(recorded.steps(1, repeat)) for repeat in (0, 1)] == [7, 40]
    chosen = RunDirectory.open(str(recorded.run))
    assert [(record.rank, record.attempt) for record in chosen.ranks] == [(0, 1), (1, 1)]
    assert any("attempt 2 of 2 are measured" in note for note in map(str, chosen.notes))


@pytest.mark.torchrun
@pytest.mark.extended
@pytest.mark.parametrize(
    "how",
    ["kill", pytest.param("raise", marks=pytest.mark.slow), pytest.param("term", marks=pytest.mark.slow)],
)
def test_a_rank_that_dies(tmp_path, how: str) -> None:
    command = [*TORCHRUN, "2", TINY, "--steps", "40", "--fail-at", "25", "--how", how]
    recorded = run_under(tmp_path, command)
    plain = run_plain(tmp_path, command)
    assert recorded.process.returncode == plain.returncode == 1
    expected = {"raise": "exitcode  : 1", "kill": "exitcode  : -9", "term": "exitcode  : -15"}[how]
    assert expected in plain.stderr and expected in recorded.process.stderr
    assert "ddpdoctor/hook" not in recorded.process.stderr
    assert recorded.folders() == ["00000", "00001"]
    assert [step["step"] for step in recorded.steps(1)] == list(range(25))
    assert len(recorded.steps(0)) in (25, 26)
    manifest = json.loads((recorded.run / "manifest.json").read_text())
    assert manifest["exit_code"] == 1 and manifest["ended_ns"]
    nobody_is_left(recorded)


@pytest.mark.torchrun
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_to_the_launcher_alone(tmp_path, number: signal.Signals) -> None:
    """As a supervisor sends it, who knows one process id: the job's launcher ends its ranks, and all they recorded is kept."""
    with running(tmp_path, forked(TINY, "--steps", "100000", "--step-ms", "5")) as process:
        until(lambda: steps_taken(tmp_path / "run") > 20, process)
        os.kill(process.pid, number)
        stderr = process.communicate(timeout=60)[1]
    assert process.returncode not in (0, None) and "recorded in" in stderr
    recorded = Recorded(process, tmp_path / "run")  # type: ignore[arg-type]
    for rank in (0, 1):
        numbers = [step["step"] for step in recorded.steps(rank)]
        assert numbers == list(range(len(numbers))) and len(numbers) > 20
    nobody_is_left(recorded)


@pytest.mark.torchrun
@pytest.mark.extended
def test_a_launcher_that_is_killed_takes_the_job_along(tmp_path) -> None:
    """What the ranks recorded waits in memory-backed storage for whoever asks for it."""
    job = [*TORCHRUN, "2", TINY, "--steps", "100000", "--step-ms", "5"]
    with running(tmp_path, job) as process:
        until(lambda: steps_taken(tmp_path / "run"), process)
        pids = pids_of(tmp_path / "run")
        process.kill()
        until(lambda: not any(map(is_alive, pids)), within_s=40)
    assert drain_spools(Path(make_spool_root(str(tmp_path / "run")))) == []
