"""Real jobs, recorded by a bundle with a Python that has torch alone, and diagnosed here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import ddpdoctor
from ddpdoctor.demo import JOB, find_fault
from tests.hook.recording import JOBS, Recorded
from tests.launch.launched import TINY, clean_environment, run_under, two_ranks_took

from .bare import OURS, bare_python
from .test_bundle import bundled

pytestmark = pytest.mark.torchrun
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> str:
    """A Python that cannot import what ddpdoctor needs."""
    pytest.importorskip("torch")
    python = bare_python(tmp_path_factory.mktemp("image") / "venv", "torch")
    code = f"import importlib.util; print([n for n in {OURS!r} if importlib.util.find_spec(n)])"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert found.stdout == "[]\n"
    return python


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    return bundled(tmp_path_factory.mktemp("archive") / "dd.pyz")


def recorded(
    bundle: Path, python: str, tmp: Path, command: list[str], *options: str, **environment: str
) -> Recorded:
    variables = clean_environment(**environment)
    by = [python, str(bundle), "run"]
    return run_under(tmp, [python, *command], *options, environment=variables, by=by)


@pytest.mark.extended
def test_a_planted_fault_is_found_in_what_it_recorded(archive, image, tmp_path):
    """The diagnosis is that of the same job under ``ddpdoctor run``: see tests/exam and tests/demo for those."""
    fault = find_fault("slow-data-one-rank")
    job = [*TWO, str(JOB), "--fault", fault.name, "--steps", "60"]
    done = recorded(archive, image, tmp_path, job, OMP_NUM_THREADS="1")
    assert done.folders() == ["00000", "00001"], done.process.stderr
    last = done.process.stderr.strip().splitlines()[-1]
    assert last.startswith("ddpdoctor: recorded in ")
    assert "`ddpdoctor analyze " in last
    assert [done.info(rank)["hook"]["errors"] for rank in (0, 1)] == [[], []]
    assert len(list((tmp_path / "run").glob("ranks/*/trace.json.gz"))) == 2
    samples = [json.loads(line) for line in next((tmp_path / "run").glob("hosts/*/telemetry.jsonl")).open()]
    ranks = [rank for sample in samples for rank in sample.get("ranks", {}).values()]
    assert any(rank["cpu_percent"] is not None for rank in ranks)
    diagnosis = ddpdoctor.analyze(tmp_path / "run")
    assert diagnosis.verdict.rule == fault.expected_rule
    assert diagnosis.findings[0].ranks == [1]
    assert diagnosis.findings[0].where[0].file == str(JOB)


@pytest.mark.slow
def test_a_folder_does_as_well_and_leaves_the_users_sitecustomize_alone(image, tmp_path):
    folder = bundled(tmp_path / "dd")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sitecustomize.py").write_text("import builtins; builtins.theirs = True\n")
    job = tmp_path / "job.py"
    job.write_text(f"assert theirs\nimport runpy\nrunpy.run_path({TINY!r}, run_name='__main__')\n")
    done = recorded(folder, image, tmp_path, [*TWO, str(job)], PYTHONPATH=str(tmp_path / "theirs"))
    two_ranks_took(done, 6)
    assert done.process.stdout == "took 6 steps\n"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["spawned.py", "forking.py"])
def test_ranks_in_processes_of_their_own_are_found(archive, image, tmp_path, script):
    """By ``multiprocessing`` with the start methods spawn and fork: each finds the hook in the archive."""
    launcher = [] if script == "spawned.py" else TWO
    done = recorded(archive, image, tmp_path, [*launcher, str(JOBS / script)])
    assert done.folders() == ["00000", "00001"], done.process.stderr
    assert [done.info(rank)["hook"]["errors"] for rank in (0, 1)] == [[], []]


@pytest.mark.slow
def test_a_job_that_hangs_is_told_and_ended(archive, image, tmp_path):
    job = [*TWO, str(JOBS / "stopping_ddp.py"), "--how", "in_a_loop", "--at", "5", "--rank", "1"]
    ends = ["--for-s", "600", "--steps", "20"]
    done = recorded(archive, image, tmp_path, [*job, *ends], "--hang-after", "4", "--on-hang", "kill")
    assert "the job seems to hang" in done.process.stderr
    assert "(in_a_loop)" in done.process.stderr
    diagnosis = ddpdoctor.analyze(tmp_path / "run")
    assert diagnosis.verdict.rule.startswith("hang/")
    assert diagnosis.findings[0].ranks == [1]


@pytest.mark.slow
def test_a_compiled_model_is_recorded(archive, image, tmp_path):
    """The compiler looks at the source of what it meets, and at the loader of its module."""
    done = recorded(archive, image, tmp_path, [*TWO[:-1], "1", str(JOBS / "compiled.py")])
    assert done.process.returncode == 0, done.process.stderr
    assert len(done.steps(0)) == 6
    assert done.info(0)["hook"]["errors"] == []


@pytest.mark.slow
def test_ranks_that_take_no_environment_are_not_recorded_and_run_on(archive, image, tmp_path):
    """As under ``ddpdoctor run``: -I, -E and -S hide the hook, and the note says so."""
    launcher = [*TWO[:2], "--standalone", "--nproc-per-node", "2", "--no-python", image, "-I", TINY]
    done = recorded(archive, image, tmp_path, launcher)
    assert done.process.returncode == 0, done.process.stderr
    assert done.folders() == []
    assert "started with -I, -E or -S" in done.process.stderr
