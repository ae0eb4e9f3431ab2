"""``ddpdoctor try`` as a user has it: real jobs, real trials, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hook.recording import JOBS, TORCHRUN, plain_environment

ROOT = Path(__file__).parents[2]
OURS = [
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); from ddpdoctor.cli import main; main()",
]
JOB = [*TORCHRUN, "2", str(JOBS / "tried.py")]


def tried(tmp_path, *arguments: str, timeout_s: float = 500) -> subprocess.CompletedProcess[str]:
    environment = plain_environment(XDG_CACHE_HOME=str(tmp_path / "cache"), TMPDIR=str(tmp_path))
    return subprocess.run(
        [*OURS, "try", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_the_list_and_what_is_refused(tmp_path):
    listed = tried(tmp_path, "--list")
    assert listed.returncode == 0
    assert "loader.num_workers" in listed.stdout
    for arguments, says in (
        ([], "say what to try"),
        (["--set", "loader.num_wokers=4"], "Did you mean loader.num_workers?"),
        (["--set", "env.LD_PRELOAD=x", "--", "true"], "only variables that tune"),
    ):
        refused = tried(tmp_path, *arguments)
        assert refused.returncode == 2
        assert says in refused.stderr
        assert refused.stderr.count("\n") == 1


@pytest.mark.torchrun
def test_a_job_that_cannot_be_measured_says_why(tmp_path):
    failed = tried(
        tmp_path,
        "--set",
        "torch.threads=1",
        "--rounds",
        "1",
        "--",
        sys.executable,
        "-c",
        "raise SystemExit(3)",
    )
    assert failed.returncode == 2
    assert "could not be measured" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.alone
def test_workers_are_faster_where_the_loader_waits_and_crashes_are_answers(tmp_path):
    found = tried(
        tmp_path,
        *("--set", "loader.num_workers=2", "--set", "ddp.comm_hook=bf16", "--steps", "40"),
        *("--json", "answer.json", "--", *JOB, "--wait-ms", "4"),
    )
    assert found.returncode == 0, found.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["schema"] == "ddpdoctor.trials/1"
    faster, refused, _ = answer["variants"]
    assert (faster["verdict"], refused["verdict"]) == ("faster", "not applied")
    assert faster["median_ms"] < 0.7 * answer["baseline"]["median_ms"]
    assert faster["parity"]["same_bits"] is True
    assert not (tmp_path / "END").exists()
    assert not list(tmp_path.glob("ddpdoctor-trial-*"))


@pytest.mark.torchrun
@pytest.mark.slow
def test_after_an_interrupt_what_was_measured_is_kept_and_nothing_else(tmp_path):
    process = subprocess.Popen(
        [
            *OURS,
            "try",
            "--set",
            "torch.threads=1",
            "--steps",
            "20",
            "--json",
            "answer.json",
            "--",
            *JOB,
            "--wait-ms",
            "2",
        ],
        cwd=tmp_path,
        env=plain_environment(TMPDIR=str(tmp_path)),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "as it is" in process.stderr.readline()
    time.sleep(2.0)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["baseline"]["trials"] >= 1
    assert not list(tmp_path.glob("ddpdoctor-trial-*"))
    own = [entry for entry in Path("/proc").glob("[0-9]*") if _runs_below(entry, tmp_path)]
    assert own == []


def _runs_below(process: Path, folder: Path) -> bool:
    try:
        return os.readlink(process / "cwd").startswith(str(folder))
    except OSError:
        return False
