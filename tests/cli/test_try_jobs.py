"""Jobs of all kinds under ``ddpdoctor try``: what becomes of them is an answer, and nothing of a trial is left."""

from __future__ import annotations

import json
import os
import sys

import pytest

from ddpdoctor.hook.environment import TRIAL, HookOptions
from tests.cli.trying import JOB, nothing_left, tried
from tests.hook.recording import JOBS, Recorded, run_recorded
from tests.launch.launched import clean_environment, program_of, python_with
from tests.launch.test_storage import mounted, needs_root

pytestmark = [pytest.mark.torchrun]
FRAMEWORKS = JOBS / "frameworks"
ASKED = {"loader.num_workers": 1, "ddp.gradient_as_bucket_view": True}


def ended_with_workers(recorded: Recorded) -> None:
    assert recorded.process.returncode == 0, recorded.process.stderr
    for rank in (0, 1):
        trial = recorded.info(rank)["trial"]
        assert {name: change["state"] for name, change in trial["changes"].items()} == dict.fromkeys(
            ASKED, "applied"
        )
        assert (trial["steps"], trial["ended"]) == (5, True)


def trial_of(tmp_path, command: list[str], **variables: str) -> Recorded:
    asked = {TRIAL: json.dumps({"set": ASKED, "steps": 5})}
    environment = clean_environment(**variables) | asked
    return run_recorded(tmp_path, command, HookOptions(profile_steps=None), environment)


def test_lightning_s_loaders_and_model_are_changed_and_its_ranks_end_together(tmp_path):
    script = str(FRAMEWORKS / "with_lightning.py")
    ended_with_workers(trial_of(tmp_path, [python_with("lightning"), script, "ddp"]))


def test_accelerate_s_loaders_and_model_are_changed_and_its_ranks_end_together(tmp_path):
    python = python_with("accelerate", program="accelerate")
    options = ["launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    options += ["--mixed_precision", "no", "--dynamo_backend", "no", str(FRAMEWORKS / "with_accelerate.py")]
    command = [str(program_of(python, "accelerate")), *options]
    ended_with_workers(trial_of(tmp_path, command, ACCELERATE_USE_CPU="true", HF_HOME=str(tmp_path)))


@pytest.mark.slow
def test_a_job_that_fails_with_a_change_says_why_and_standard_output_is_the_answer_alone(tmp_path):
    found = tried(
        tmp_path,
        *("--set", "loader.num_workers=2", "--rounds", "1", "--steps", "20", "--json", "-"),
        *("--", *JOB, "--fails-with-workers"),
    )
    assert found.returncode == 0, found.stderr
    (variant,) = json.loads(found.stdout)["variants"]
    assert variant["verdict"] == "failed"
    assert "RuntimeError: this data set cannot be sent to workers" in variant["why"]
    assert "as it is" in found.stderr
    assert not (tmp_path / "-").exists()
    nothing_left(tmp_path)


@pytest.mark.slow
def test_a_trial_in_a_copy_writes_nothing_where_the_job_lies(tmp_path):
    writes = "from pathlib import Path\nPath(f'written-{rank}').write_text('x')\n"
    script = (JOBS / "tried.py").read_text()
    place = '    dist.init_process_group("gloo")\n'
    assert place in script
    body = f"    rank = dist.get_rank()\n{''.join(f'    {line}' + chr(10) for line in writes.splitlines())}"
    (tmp_path / "job.py").write_text(script.replace(place, place + body))
    os.mkfifo(tmp_path / "pipe")
    command = [*JOB[:-1], "job.py"]
    found = tried(
        tmp_path,
        *("--set", "torch.threads=1", "--rounds", "1", "--steps", "20", "--cwd", "copy"),
        *("--json", "answer.json", "--", *command),
    )
    assert found.returncode == 0, found.stderr
    assert list(tmp_path.glob("written-*")) == []
    notes = json.loads((tmp_path / "answer.json").read_text())["notes"]
    assert "The copy of the working directory lacks 1 pipe, socket or device." in notes
    nothing_left(tmp_path)


@needs_root
def test_an_answer_that_finds_no_room_is_one_sentence(tmp_path):
    with mounted(tmp_path / "full", "size=16k") as full:
        with pytest.raises(OSError, match="No space left"):
            (full / "filled").write_bytes(b"x" * (1 << 20))
        arguments = ["--set", "torch.threads=1", "--json", str(full / "answer.json")]
        failed = tried(tmp_path, *arguments, "--", sys.executable, "-c", "raise SystemExit(3)")
        assert failed.returncode == 2
        assert "Traceback" not in failed.stderr
        assert "answer.json: No space left on device" in failed.stderr.splitlines()[-1]
    nothing_left(tmp_path)
