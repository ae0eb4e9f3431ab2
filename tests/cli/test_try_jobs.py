"""Jobs of all kinds under ``ddpdoctor try``: each gives a result, and nothing of a trial remains."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest

from ddpdoctor.hook.environment import TRIAL, HookOptions
from tests.cli.trying import JOB, nothing_left, tried, trying
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


@pytest.mark.extended
def test_lightning_s_loaders_and_model_are_changed_and_its_ranks_end_together(tmp_path):
    script = str(FRAMEWORKS / "with_lightning.py")
    ended_with_workers(trial_of(tmp_path, [python_with("lightning"), script, "ddp"]))


@pytest.mark.extended
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
    assert "unchanged" in found.stderr
    assert not (tmp_path / "-").exists()
    nothing_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--short-on", "1"], "could not be measured: it ended with exit code 1"),
        (["--short-on", "1", "--join"], "a rank took only 10 of 20 steps"),
    ],
    ids=["alone", "join"],
)
def test_a_rank_that_ends_early_is_reported(tmp_path, arguments, says):
    """Without Join the others fail while they wait for it; with Join they reach the trial's end."""
    settings = ["--set", "torch.threads=1", "--rounds", "1", "--steps", "20", "--json", "answer.json"]
    found = tried(tmp_path, *settings, "--", *JOB, "--batches", "20", *arguments)
    assert found.returncode == 2, found.stderr
    assert says in found.stderr
    assert "Traceback" not in found.stderr
    nothing_left(tmp_path)


@pytest.mark.slow
def test_a_change_that_one_rank_refuses_is_not_applied(tmp_path):
    settings = ["--set", "loader.num_workers=2", "--rounds", "1", "--steps", "20", "--json", "answer.json"]
    found = tried(tmp_path, *settings, "--", *JOB, "--iterable-on", "1")
    assert found.returncode == 0, found.stderr
    (variant,) = json.loads((tmp_path / "answer.json").read_text())["variants"]
    assert (variant["verdict"], variant["median_ms"]) == ("not applied", None)
    assert "Stream is iterable" in variant["why"]
    nothing_left(tmp_path)


WRITES = """\
    from pathlib import Path
    Path(f"written-{dist.get_rank()}").write_text("x")
    with open(WROTE, "a") as told:
        print(Path.cwd(), *sorted(each.name for each in Path().iterdir()), file=told)
"""


@pytest.mark.slow
def test_files_of_a_trial_stay_in_its_copy_which_is_removed(tmp_path):
    script, place = (JOBS / "tried.py").read_text(), '    dist.init_process_group("gloo")\n'
    assert place in script
    own, wrote = tmp_path / "own", tmp_path / "wrote"
    own.mkdir()
    (own / "job.py").write_text(script.replace(place, place + WRITES.replace("WROTE", repr(str(wrote)))))
    (own / "kept").write_text("as it was")
    os.mkfifo(own / "pipe")
    command = [*JOB[:-1], "job.py"]
    found = tried(
        own,
        *("--set", "torch.threads=1", "--rounds", "1", "--steps", "20", "--cwd", "copy"),
        *("--json", "answer.json", "--", *command),
        temporary=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    told = [line.split() for line in wrote.read_text().splitlines()]
    assert len(told) == 2 * 3  # of two ranks: as it is, the change, as it is
    for folder, *names in told:
        assert folder.startswith(str(tmp_path / "ddpdoctor-trial-"))
        assert not Path(folder).exists()
        assert {"job.py", "kept"} < set(names)
        assert "pipe" not in names
    assert len({folder for folder, *_ in told}) == 3
    assert sorted(each.name for each in own.iterdir()) == ["answer.json", "job.py", "kept", "pipe"]
    notes = json.loads((own / "answer.json").read_text())["notes"]
    assert "The copy of the working directory lacks 1 pipe, socket or device." in notes
    nothing_left(tmp_path)


@needs_root
@pytest.mark.slow
def test_a_full_disk_keeps_the_results_before_it(tmp_path):
    """Of the disk that trials record on: what was measured before is kept, and the answer says what became of the rest."""
    with mounted(tmp_path / "small", "size=4m") as small:
        settings = ["--set", "torch.threads=1", "--steps", "20", "--json", str(tmp_path / "answer.json")]
        process = trying(tmp_path, small, *settings, "--", *JOB, "--wait-ms", "2")
        with contextlib.suppress(OSError), (small / "filled").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        _, rest = process.communicate()
        assert process.returncode == 0, rest
        assert "Traceback" not in rest
        answer = json.loads((tmp_path / "answer.json").read_text())
        assert answer["baseline"]["trials"] >= 1
        assert answer["baseline"]["median_ms"] > 0
        (variant,) = answer["variants"]
        assert variant["verdict"] == "failed"
        assert f"no space is left in {small}" in variant["why"]
        assert not list(small.glob("ddpdoctor-*")), "what torchrun leaves there is its own"
    nothing_left(tmp_path)


@needs_root
def test_results_without_disk_space_are_one_sentence(tmp_path):
    with mounted(tmp_path / "full", "size=16k") as full:
        with pytest.raises(OSError, match="No space left"):
            (full / "filled").write_bytes(b"x" * (1 << 20))
        arguments = ["--set", "torch.threads=1", "--json", str(full / "answer.json")]
        failed = tried(tmp_path, *arguments, "--", sys.executable, "-c", "raise SystemExit(3)")
        assert failed.returncode == 2
        assert "Traceback" not in failed.stderr
        assert "answer.json: No space left on device" in failed.stderr.splitlines()[-1]
    nothing_left(tmp_path)
