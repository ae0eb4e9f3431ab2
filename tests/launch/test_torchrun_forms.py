"""The ways in which ranks are started with what comes with torch, and shapes of jobs that are not quite that."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.hook.recording import JOBS, TORCHRUN

from .launched import TINY, clean_environment, program_of, run_under, two_ranks_took

TWO = ["--standalone", "--nproc-per-node", "2"]


@pytest.mark.torchrun
def test_torchrun_of_a_script(tmp_path) -> None:
    recorded = run_under(tmp_path, [str(program_of(sys.executable, "torchrun")), *TWO, TINY])
    two_ranks_took(recorded, 6)
    assert recorded.process.stdout == "took 6 steps\n"
    assert [recorded.info(rank)["local_rank"] for rank in (0, 1)] == [0, 1]


@pytest.mark.torchrun
@pytest.mark.slow
def test_torchrun_of_a_module(tmp_path) -> None:
    environment = clean_environment(PYTHONPATH=str(JOBS))
    recorded = run_under(
        tmp_path, [*TORCHRUN, "2", "-m", "tiny_ddp", "--steps", "5"], environment=environment
    )
    two_ranks_took(recorded, 5)
    assert recorded.process.stdout == "took 5 steps\n"


@pytest.mark.torchrun
@pytest.mark.slow
def test_torchrun_of_a_program(tmp_path) -> None:
    recorded = run_under(tmp_path, [*TORCHRUN, "2", "--no-python", sys.executable, TINY])
    two_ranks_took(recorded, 6)


@pytest.mark.torchrun
@pytest.mark.slow
def test_a_console_command_that_starts_its_own_ranks(tmp_path) -> None:
    tool = tmp_path / "sometool"
    tool.write_text(
        f"#!{sys.executable}\n"
        "import subprocess, sys\n"
        "assert sys.argv[1] == 'train'\n"
        f"sys.exit(subprocess.call({[*TORCHRUN, '2', TINY]!r} + sys.argv[2:]))\n"
    )
    tool.chmod(0o755)
    environment = clean_environment()
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    recorded = run_under(tmp_path, ["sometool", "train", "--steps", "5"], environment=environment)
    two_ranks_took(recorded, 5)


@pytest.mark.torchrun
@pytest.mark.extended
def test_a_job_in_another_environment_without_ddpdoctor(tmp_path) -> None:
    """Its site-packages are this one's, but for ddpdoctor."""
    import torch

    venv.create(tmp_path / "job", with_pip=False, symlinks=True)
    python = str(tmp_path / "job" / "bin" / "python")
    (packages,) = (tmp_path / "job" / "lib").glob("python*/site-packages")
    for entry in Path(torch.__file__).parents[1].iterdir():
        if "ddpdoctor" not in entry.name and not entry.name.endswith(".pth"):
            (packages / entry.name).symlink_to(entry)
    missing = subprocess.run(
        [python, "-c", "import ddpdoctor"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert "ModuleNotFoundError" in missing.stderr
    command = [python, "-m", "torch.distributed.run", *TWO, TINY]
    two_ranks_took(run_under(tmp_path, command), 6)


@pytest.mark.parametrize(
    "command",
    [[sys.executable, "-c", "print('hello')"], ["sh", "-c", "env -i echo hello"]],
)
def test_a_job_without_ranks(tmp_path, command: list[str]) -> None:
    recorded = run_under(tmp_path, command)
    assert (recorded.process.returncode, recorded.process.stdout) == (0, "hello\n")
    assert recorded.process.stderr.count("\n") == 1 and "no rank was recorded" in recorded.process.stderr


@pytest.mark.torchrun
@pytest.mark.extended
def test_ranks_that_do_not_get_the_environment(tmp_path) -> None:
    """As those of a cluster that was up before: they run as ever, and one note says why nothing was recorded."""
    cleared = ["env", "-i", f"PATH={tmp_path}", "OMP_NUM_THREADS=1"]
    recorded = run_under(tmp_path, [*cleared, *TORCHRUN, "2", TINY])
    assert (recorded.process.returncode, recorded.process.stdout) == (0, "took 6 steps\n")
    said = [line for line in recorded.process.stderr.splitlines() if line.startswith("ddpdoctor")]
    assert len(said) == 1 and "did not get the command's environment" in said[0]
    assert recorded.folders() == []
