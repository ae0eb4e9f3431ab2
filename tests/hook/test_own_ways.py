"""What the job does in its own way stays so: its hooks, subclasses, children, profilers and start-up files."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from ddpdoctor.hook.environment import HookOptions, job_environment

from .recording import JOBS, forked, plain_environment, run_plain, run_recorded, torchrun


@pytest.mark.torchrun
@pytest.mark.parametrize("more", [[], pytest.param(["--all-kinds"], marks=pytest.mark.extended)])
def test_communication_hook_subclass_children_and_pickles(tmp_path, more: list[str]) -> None:
    command = forked("own_ways.py", *more)
    plain = run_plain(tmp_path, command)
    recorded = run_recorded(tmp_path, command, HookOptions(profile_steps=(2, 4)))
    assert recorded.process.returncode == plain.returncode == 0, recorded.process.stderr
    assert sorted(recorded.process.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    assert "forwards 5 reduced [10, 10, 10, 10, 10]" in plain.stdout and "forked 0" in plain.stdout
    assert recorded.folders() == ["00000", "00001"]
    # The last three are those of a model without DDP that rank 0 trains for itself, and its children after it.
    assert [len(recorded.steps(rank)) for rank in (0, 1)] == [8, 5]
    info = recorded.info(0)
    assert info["window"]["state"] == "saved" and info["loaders"][0]["dataset_length"] is None


@pytest.mark.extended
def test_a_profiler_of_python_calls_wins(tmp_path) -> None:
    command = [sys.executable, "-m", "cProfile", str(JOBS / "single.py")]
    recorded = run_recorded(tmp_path, command, HookOptions(profile_steps=(2, 4)))
    assert recorded.process.returncode == 0, recorded.process.stderr
    assert "single done\n" in recorded.process.stdout and "function calls" in recorded.process.stdout
    assert recorded.process.stderr == ""
    window = recorded.info(0)["window"]
    assert window["state"] == "skipped" and "cProfile" in window["why"]
    assert len(recorded.steps(0)) == 8


@pytest.mark.torchrun
def test_nsight_wins(tmp_path) -> None:
    base = plain_environment(NSYS_PROFILING_SESSION_ID="17")
    recorded = run_recorded(tmp_path, forked("single.py", ranks=0), HookOptions(profile_steps=(2, 4)), base)
    window = recorded.info(0)["window"]
    assert window["state"] == "skipped" and "Nsight Systems" in window["why"]


def start_up(
    tmp: Path, python: str, *arguments: str, stdin: str = "", **variables: str
) -> list[tuple[str, str]]:
    """Output and errors of an interpreter without and with the hook in its environment."""
    plain = plain_environment(**variables)
    hooked = job_environment(str(tmp / "run"), str(tmp / "spool"), HookOptions(), plain)
    return [
        (done.stdout, done.stderr)
        for done in (
            subprocess.run(
                [python, *arguments],
                input=stdin,
                env=environment,
                cwd=tmp,
                capture_output=True,
                text=True,
                check=True,
            )
            for environment in (plain, hooked)
        )
    ]


def test_the_start_up_file_of_an_interactive_python(tmp_path) -> None:
    (tmp_path / "start.py").write_text("print('from the start-up file')\n")
    startup = str(tmp_path / "start.py")
    plain, hooked = start_up(
        tmp_path, sys.executable, "-i", "-q", stdin="print(6 * 7)\n", PYTHONSTARTUP=startup
    )
    assert hooked == plain and "from the start-up file\n" in plain[0] and "42" in plain[0]


def test_usercustomize(tmp_path) -> None:
    python = os.path.realpath(sys.executable)
    asks = [python, "-c", "import site; print(site.getusersitepackages())"]
    environment = plain_environment(PYTHONUSERBASE=str(tmp_path / "base"))
    folder = subprocess.run(asks, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    Path(folder).mkdir(parents=True)
    (Path(folder) / "usercustomize.py").write_text("print('from usercustomize')\n")
    plain, hooked = start_up(tmp_path, python, "-c", "print(1)", PYTHONUSERBASE=str(tmp_path / "base"))
    assert hooked == plain == ("from usercustomize\n1\n", "")


@pytest.mark.skipif(
    (Path(os.__file__).parent / "sitecustomize.py").exists(),
    reason="this Python has a sitecustomize before any prefix's",
)
def test_a_prefix_with_a_sitecustomize_and_paths_of_its_own(tmp_path) -> None:
    venv.create(tmp_path / "prefix", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "prefix" / "lib").glob("python*/site-packages")
    (packages / "sitecustomize.py").write_text("import sys\nsys.from_the_prefix = __file__\n")
    (packages / "more.pth").write_text(f"{tmp_path}/more\n")
    for folder in ("more", "own"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"module_{folder}.py").write_text("")
    code = "import module_more, module_own, sitecustomize, sys; print(sys.prefix, sys.from_the_prefix, sitecustomize.__file__)"
    python = str(tmp_path / "prefix" / "bin" / "python")
    plain, hooked = start_up(tmp_path, python, "-c", code, PYTHONPATH=str(tmp_path / "own"))
    assert hooked == plain
    assert plain[0].split()[1:] == [str(packages / "sitecustomize.py")] * 2


@pytest.mark.torchrun
@pytest.mark.slow
def test_a_compiler_with_its_pool_of_workers(tmp_path) -> None:
    command = torchrun("compiled.py", "--backend", "inductor", ranks=2)
    base = plain_environment(
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"), TORCHINDUCTOR_COMPILE_THREADS="2"
    )
    recorded = run_recorded(tmp_path, command, base=base, timeout_s=400)
    assert recorded.process.returncode == 0, recorded.process.stderr
    assert recorded.folders() == ["00000", "00001"]
    assert [len(recorded.steps(rank)) for rank in (0, 1)] == [6, 6]
    assert recorded.info(0)["compiled"] is True and recorded.info(0)["hook"]["errors"] == []


CLOSING = """
import os, sys, time, torch
layer = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
own = []
for step in range(8):
    if step == 4:
        writer = sys.modules["_ddpdoctor.hook.recording"].active.session.writer
        writer.flush(time.monotonic() + 60)  # its files are open for moments only: not again for a second
        os.closerange(3, 256)
        own = [open(f"own-{number}", "w+") for number in range(40)]
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
for each in own:
    each.write("mine")
    each.close()
"""


@pytest.mark.torchrun
def test_a_job_that_closes_all_files(tmp_path) -> None:
    """The numbers of our files become those of the job's own, which must not get what was meant for ours."""
    (tmp_path / "closing.py").write_text(CLOSING)
    recorded = run_recorded(tmp_path, forked(tmp_path / "closing.py", ranks=0))
    assert recorded.process.returncode == 0, recorded.process.stderr
    assert {(tmp_path / f"own-{number}").read_text() for number in range(40)} == {"mine"}
    assert len(recorded.steps(0)) == 8
