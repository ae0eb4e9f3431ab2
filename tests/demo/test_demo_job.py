"""Every planted fault trains to the end by itself, without ddpdoctor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddpdoctor.cli.demo import command
from ddpdoctor.demo import FAULTS, JOB, find_fault
from ddpdoctor.errors import DdpDoctorError

RULES = Path(__file__).resolve().parents[2] / "rules"


EACH_FAULT = """
import pathlib, runpy, sys
import torch.distributed as dist
train = runpy.run_path(sys.argv[1])["train"]
dist.init_process_group("gloo")
for fault in sys.argv[3:]:
    train(fault, 10, pathlib.Path(sys.argv[2]))
    if dist.get_rank() == 0:
        print(fault, "done", flush=True)
dist.barrier()
"""


def torchrun(folder, *arguments):
    """stdout of a two-rank job, which must end well."""
    pytest.importorskip("torch")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, *map(str, arguments)]
    for _ in range(3):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=folder,
            timeout=200,
        )
        # Gloo's own teardown aborts now and then, with or without ddpdoctor; that is not what is tested here.
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.torchrun
@pytest.mark.slow
def test_the_job_trains_and_ends_well(tmp_path):
    assert torchrun(tmp_path, JOB, "--steps", "20") == "step 20 of 20\n"


@pytest.mark.torchrun
@pytest.mark.slow
def test_every_fault_trains(tmp_path):
    (tmp_path / "each_fault.py").write_text(EACH_FAULT)
    out = torchrun(tmp_path, "each_fault.py", JOB, tmp_path, *(fault.name for fault in FAULTS))
    assert out.splitlines() == [f"{fault.name} done" for fault in FAULTS]
    assert (tmp_path / "checkpoint.pt").exists()


def test_the_job_knows_nothing_of_ddpdoctor():
    assert "ddpdoctor" not in JOB.read_text()


def test_each_fault_is_planted_in_the_job():
    text = JOB.read_text()
    for fault in FAULTS:
        assert fault.name in text


def test_each_expected_rule_exists():
    for fault in FAULTS:
        assert fault.expected_rule is None or (RULES / f"{fault.expected_rule}.yaml").is_file(), fault


def test_names_are_unique_and_an_unknown_one_is_refused_with_the_known_ones():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert find_fault("barrier").expected_rule == "sync/explicit-barrier"
    with pytest.raises(DdpDoctorError, match=r"no fault called nonsense; there are healthy, slow-data,"):
        find_fault("nonsense")


def test_the_list_names_every_fault():
    result = CliRunner().invoke(command, ["--list"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines()] == [fault.name for fault in FAULTS]


def test_without_torch_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(command, [])
    assert isinstance(result.exception, DdpDoctorError)
    assert "pip install '.[torch]'" in str(result.exception)
