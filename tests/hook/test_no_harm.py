"""The job does what it does without us: same numbers, same output, same ends, same other tools."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.hook.environment import HookOptions, job_environment
from ddpdoctor.launch.leftovers import drain_spools
from ddpdoctor.rundir.spool import make_spool_root
from tests.waiting import until

from .recording import Recorded, forked, one_rank, plain_environment, run_plain, run_recorded


@pytest.mark.torchrun
@pytest.mark.parametrize("ranks", [2, 3])
def test_parameters_are_identical_bit_for_bit(tmp_path, ranks: int) -> None:
    command = forked("plain_ddp.py", "--steps", "14", "--exit-hard", "--out", "result", ranks=ranks)
    plain = run_plain(tmp_path, command)
    expected = [json.loads((tmp_path / f"result.{rank}").read_text()) for rank in range(ranks)]
    recorded = run_recorded(tmp_path, command, HookOptions(profile_steps=(4, 9)))
    found = [json.loads((tmp_path / f"result.{rank}").read_text()) for rank in range(ranks)]
    assert found == expected
    assert (
        (recorded.process.returncode, recorded.process.stdout)
        == (plain.returncode, plain.stdout)
        == (0, "done 14\n")
    )
    assert recorded.info(ranks - 1)["window"]["state"] in ("saved", "saving")


@pytest.mark.torchrun
@pytest.mark.parametrize(
    "context", ["fork", *(pytest.param(name, marks=pytest.mark.extended) for name in ("spawn", "forkserver"))]
)
def test_workers_of_the_data_loader_are_not_ranks(tmp_path, context: str) -> None:
    command = forked(
        "plain_ddp.py", "--steps", "4", "--workers", "1", "--context", context, "--exit-hard", ranks=1
    )
    recorded = run_recorded(tmp_path, command)
    assert recorded.process.returncode == 0, recorded.process.stderr
    assert recorded.folders() == ["00000"] and len(recorded.steps(0)) == 4


@pytest.mark.torchrun
@pytest.mark.parametrize("build_at", [0, 7, 11])
def test_the_jobs_own_profiler_wins(tmp_path, build_at: int) -> None:
    command = forked("profiled_by_itself.py", "--build-at", str(build_at), "--out", str(tmp_path), ranks=1)
    recorded = run_recorded(tmp_path, command)
    assert recorded.process.returncode == 0, recorded.process.stderr
    own = json.loads((tmp_path / "own-0.json").read_text())
    assert any(event.get("name") == "DistributedDataParallel.forward" for event in own["traceEvents"])
    window = recorded.info(0)["window"]
    if build_at < 10:
        assert window["state"] == "skipped" and "own" in window["why"]
    else:
        assert window["steps"] == [10, 11] and "own" in window["why"]
    assert len(recorded.steps(0)) == 30


@pytest.mark.torchrun
def test_steps_survive_a_kill(tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    spool = make_spool_root(str(run))
    environment = job_environment(str(run), spool, HookOptions(), plain_environment())
    command = forked("plain_ddp.py", "--steps", "100000", ranks=1)
    job = subprocess.Popen(command, env=environment, cwd=tmp_path)
    steps = run / "ranks" / "00000" / "steps.jsonl"
    until(lambda: steps.exists() and steps.read_bytes().count(b'"step"') > 20)
    os.kill(json.loads((run / "ranks" / "00000" / "rank.json").read_text())["pid"], signal.SIGKILL)
    job.wait()
    before = steps.read_bytes().count(b'"step":')
    assert not drain_spools(Path(spool))
    recorded = Recorded(subprocess.CompletedProcess([], -9), run)
    numbers = [step["step"] for step in recorded.steps(0)]
    assert numbers == list(range(len(numbers))) and len(numbers) >= before > 20
    assert not os.path.exists(spool)


def test_the_users_own_sitecustomize_runs(tmp_path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import builtins\nbuiltins.from_the_user = __file__\n")
    base = plain_environment(PYTHONPATH=str(folder))
    code = "import sitecustomize, sys; print(from_the_user == sitecustomize.__file__, 'torch' in sys.modules)"
    recorded = run_recorded(tmp_path, [sys.executable, "-c", code], base=base)
    assert recorded.process.stdout == "True False\n" and recorded.process.stderr == ""


def test_an_error_in_the_users_sitecustomize_shows_as_ever(tmp_path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("raise ValueError('mine')\n")
    base = plain_environment(PYTHONPATH=str(folder))
    recorded = run_recorded(tmp_path, [sys.executable, "-c", "print(1)"], base=base)
    assert recorded.process.returncode == 0 and recorded.process.stdout == "1\n"
    assert (
        "ValueError: mine" in recorded.process.stderr
        and "ddpdoctor" not in recorded.process.stderr.split("Error")[-1]
    )


def test_a_python_without_torch_is_left_alone(tmp_path) -> None:
    code = "import sys; print(sorted(name for name in sys.modules if name.startswith('_ddpdoctor')))"
    recorded = run_recorded(tmp_path, [sys.executable, "-c", code])
    assert (
        recorded.process.stdout
        == "['_ddpdoctor', '_ddpdoctor.hook', '_ddpdoctor.hook.fatalsignals', '_ddpdoctor.hook.finder']\n"
    )
    assert recorded.folders() == []


@pytest.mark.extended
def test_torch_looks_the_same(tmp_path) -> None:
    code = (
        "import inspect, torch, torch.distributed as d\n"
        "print(type(torch.__loader__).__name__, 'def ' in inspect.getsource(torch), inspect.signature(d.all_reduce),"
        " inspect.signature(torch.save), torch.autograd.backward.__name__, d.all_reduce.__wrapped__.__name__)"
    )
    plain = run_plain(tmp_path, [sys.executable, "-c", code])
    recorded = run_recorded(tmp_path, [sys.executable, "-c", code])
    assert recorded.process.stdout == plain.stdout and "SourceFileLoader True" in plain.stdout
    assert recorded.process.stderr == plain.stderr


@pytest.mark.extended
@pytest.mark.torchrun
def test_compiled_models_and_optimizers(tmp_path) -> None:
    command = one_rank("compiled.py")
    plain = run_plain(tmp_path, command)
    recorded = run_recorded(tmp_path, command)
    assert recorded.process.returncode == plain.returncode == 0, recorded.process.stderr
    assert recorded.process.stdout == plain.stdout and "graphs" in plain.stdout
    assert len(recorded.steps(0)) == 6
    assert recorded.info(0)["hook"]["errors"] == []


@pytest.mark.torchrun
@pytest.mark.parametrize("state", ["vanished", "read-only"])
def test_a_run_directory_that_cannot_be_written(tmp_path, state: str) -> None:
    run = tmp_path / "run"
    environment = job_environment(str(run / "gone" if state == "vanished" else "/proc/nothing"), str(tmp_path / "spool"),
                                  HookOptions(), plain_environment())  # fmt: skip
    job = subprocess.run(
        forked("single.py", ranks=0),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert job.returncode == 0 and job.stdout == "single done\n"
    assert job.stderr.count("\n") <= 1


@pytest.mark.torchrun
@pytest.mark.parametrize("more", ["--layers", pytest.param("--more-ops", marks=pytest.mark.extended)])
def test_a_trace_stays_below_its_limit(tmp_path, more: str) -> None:
    """A window is shortened by the size of the autograd graph; where that misleads, nothing is kept of the trace."""
    (tmp_path / "temporary").mkdir()
    size = {"--layers": "100", "--more-ops": "12000"}[more]
    command = forked("plain_ddp.py", "--steps", "60", more, size, "--exit-hard", ranks=1)
    base = plain_environment(TMPDIR=str(tmp_path / "temporary"))
    recorded = run_recorded(tmp_path, command, HookOptions(profile_steps=(5, 14), max_trace_mb=1), base)
    assert recorded.process.stdout == "done 60\n" and len(recorded.steps(0)) == 60
    window, trace = recorded.info(0)["window"], recorded.folder(0) / "trace.json.gz"
    assert "--max-trace-mb" in window["why"]
    if more == "--layers":
        first, stop = window["steps"]
        assert window["state"] == "saved" and first == 5 and 6 <= stop < 14
        assert trace.stat().st_size == window["bytes"] <= 1_000_000
    else:
        assert window["state"] == "skipped" and not trace.exists()
    left = [*recorded.folder(0).glob("*.tmp"), *(tmp_path / "temporary").glob("ddpdoctor-*.json")]
    assert left == []
