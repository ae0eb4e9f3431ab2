"""How real jobs end, and what is concluded of it: each is a row of the table in docs/job-ends.md. The rows of Ray, Lightning,
accelerate and MPI whose ranks end well are in ``two_ranks_took``, by which their own tests end."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.diagnose.diagnosis import Diagnosis
from tests.hook.recording import JOBS, TORCHRUN, forked

from .launched import DDPDOCTOR_RUN, clean_environment, ended_well, run_under
from .test_hosts import finish, started

pytestmark = pytest.mark.torchrun
ENDING = str(JOBS / "ending_ddp.py")
SLOW = pytest.mark.slow


def ended(tmp: Path, command: list[str], code: int) -> Path:
    """The run of a job that ends with that code."""
    # Otherwise torch 2.13 lets a second attempt read the first one's addresses, now and then, with us or without.
    environment = clean_environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    recorded = run_under(tmp, command, "--no-profile", environment=environment, timeout_s=120)
    assert recorded.process.returncode == code, recorded.process.stderr
    return recorded.run


def two_ranks(how: str) -> list[str]:
    return forked(ENDING, how)


def hidden(command: list[str]) -> list[str]:
    """In a script that hides its exit code."""
    return ["sh", "-c", '"$@" || true', "sh", *command]


def spawned(how: str) -> list[str]:
    return [sys.executable, ENDING, how, "--spawn"]


def failed(run: Path, headline: str, rank: int = 1) -> Diagnosis:
    diagnosis = analyze(str(run))
    assert diagnosis.verdict.headline.startswith(headline), diagnosis.verdict.headline
    assert diagnosis.findings[0].ranks == [rank]
    return diagnosis


@pytest.mark.parametrize(
    "how",
    [
        "exit0",
        pytest.param("systemexit1", marks=SLOW),
        pytest.param("exit1", marks=SLOW),
        pytest.param("killed_after", marks=SLOW),
    ],
)
def test_whose_ranks_are_through_and_whose_exit_code_is_0(tmp_path: Path, how: str) -> None:
    """The process group is destroyed: whatever the last rank's exit code is then, nobody needs it any more."""
    assert not [note for note in ended_well(ended(tmp_path, hidden(two_ranks(how)), 0)) if "SIG" in note]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("systemexit1", "the program itself chose exit code 1"),
        pytest.param("exit1", "It had ended its process group before", marks=SLOW),
        pytest.param("killed_after", "It had ended its process group before", marks=SLOW),
    ],
)
def test_the_same_where_the_job_fails_by_it(tmp_path: Path, how: str, says: str) -> None:
    told = "died (SIGKILL)" if how == "killed_after" else "ended with exit code 1"
    diagnosis = failed(ended(tmp_path, two_ranks(how), 1), f"The job failed: rank 1 {told}")
    assert says in diagnosis.findings[0].explanation


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("killed", "died (SIGKILL)"),
        pytest.param("term", "died (SIGTERM)", marks=SLOW),
        pytest.param("systemexit3", "ended with exit code 3", marks=SLOW),
        pytest.param("exit0_amid", "exited before the others (exit code 0)", marks=SLOW),
    ],
)
def test_a_rank_that_others_lose(tmp_path: Path, how: str, told: str) -> None:
    """The same rank is named whether or not the exit code tells of it."""
    diagnosis = failed(
        ended(tmp_path, hidden(two_ranks(how)), 0), f"The job ended with exit code 0, but rank 1 {told}"
    )
    assert diagnosis.facts["hang"]["hidden"] and diagnosis.job.exit_code == 0
    (tmp_path / "told").mkdir()
    failed(ended(tmp_path / "told", two_ranks(how), 1), f"The job failed: rank 1 {told}")


def test_ranks_that_all_end_alike_and_an_exit_code_of_0(tmp_path: Path) -> None:
    """A controller may end its workers so; a script may hide that somebody killed them. It is said, and no failure."""
    notes = ended_well(ended(tmp_path, hidden(two_ranks("killed_all")), 0))
    assert any(
        note.startswith("Ranks 0, 1 were ended by SIGKILL without closing the process group")
        for note in notes
    )


@pytest.mark.extended
def test_an_elastic_restart_that_succeeds(tmp_path: Path) -> None:
    """The first attempt has taken more steps, and is the one that is analysed."""
    run = ended(tmp_path, [*TORCHRUN, "2", "--max-restarts", "1", ENDING, "resumed"], 0)
    notes = ended_well(run)
    assert any("The steps of recorded attempt 1 of 2 are measured" in note for note in notes)
    facts = analyze(str(run)).facts["run"]
    first, second = facts["attempts"]
    assert (first["ended"], second["ended"]) == ("rank 1 ended by SIGKILL", "finished normally")
    assert (
        first["is_measured"] and first["ended_s"] < second["started_s"] < second["ended_s"] < facts["wall_s"]
    )
    restarts = facts["restarts"]
    assert (restarts["count"], restarts["ranks"], restarts["repeated_steps"]) == (1, [1], None)
    assert 0 < restarts["total_s"] < facts["wall_s"] and facts["later_attempts_s"] > 0
    assert [step["steps"] for step in analyze(str(run), Options(attempt=2)).facts["run"]["attempts"]] == [
        first["steps"],
        second["steps"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "systemexit3", "destroyed"])
def test_ranks_of_spawn(tmp_path: Path, how: str) -> None:
    run = ended(tmp_path, spawned(how), 0 if how == "destroyed" else 1)
    if how == "destroyed":
        ended_well(run)
    else:
        told = "died (SIGKILL)" if how == "killed" else "ended with exit code 3"
        failed(run, f"The job failed: rank 1 {told}")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpiexec"), reason="no mpiexec here")
def test_ranks_of_mpi(tmp_path: Path) -> None:
    command = ["mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, ENDING]
    run = ended(tmp_path, [*command, "systemexit3", str(tmp_path / "store")], 3)
    failed(run, "The job failed: rank 1 ended with exit code 3")


@pytest.mark.extended
def test_one_launcher_for_each_rank(tmp_path: Path) -> None:
    """As under srun: the exit code of the job is not that of the launcher that made the run directory."""
    shared = {"SLURM_JOB_ID": "78", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    environments = [
        clean_environment(**shared, SLURM_PROCID=str(task), SLURM_LOCALID=str(task)) for task in (0, 1)
    ]
    job = [sys.executable, ENDING, "systemexit1", str(tmp_path / "store")]
    with started([[*DDPDOCTOR_RUN, "--", *job]] * 2, environments, tmp_path) as processes:
        assert [process.returncode for process in finish(processes)] == [0, 1]
    run = tmp_path / "ddpdoctor-runs" / "slurm-78.0-ending_ddp"
    assert failed(run, "The job failed: rank 1 ended with exit code 1").job.exit_code == 1
