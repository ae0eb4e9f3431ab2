"""``ddpdoctor try`` with real jobs and trials, and the files that remain."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from ddpdoctor.cli import trials
from ddpdoctor.cli.trials import write_patch
from ddpdoctor.diagnose import facts_view
from ddpdoctor.diagnose.diagnosis import Steps
from ddpdoctor.diagnose.trials import TRIALS_FILE, Baseline, TrialsReport, Variant
from ddpdoctor.experiment import Proposal
from ddpdoctor.measure.facts import DdpFacts, Facts, LoaderFacts
from ddpdoctor.measure.places import Where
from ddpdoctor.report.summary import ranks_of_command
from tests.cli.trying import JOB, ROOT, nothing_left, tried, trying
from tests.commands import command
from tests.hook.recording import forked
from tests.report import samples


def offered(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``ddpdoctor try`` without a job."""
    return command("try", *arguments, cwd=folder)


def test_the_list_of_settings_and_refusals(tmp_path):
    listed = offered(tmp_path, "--list")
    assert listed.returncode == 0
    assert "loader.num_workers" in listed.stdout
    for arguments, says in (
        ([], "nothing to try"),
        (["--set", "loader.num_wokers=4"], "Did you mean loader.num_workers?"),
        (["--set", "env.LD_PRELOAD=x", "--", "true"], "only variables that tune"),
        (["--set", "loader.num_workers=1025", "--", "true"], "it takes 0 to 1024"),
        (["--set", "torch.threads=1", "--json", "no/f", "--", "true"], "no/f: No such file or directory"),
        (["--set", "torch.threads=1", "--patch", ".", "--", "true"], "cannot write .: Is a directory"),
    ):
        refused = offered(tmp_path, *arguments)
        assert refused.returncode == 2
        assert says in refused.stderr
        assert refused.stderr.count("\n") == 1
    hinted = offered(tmp_path, "--set", "torch.threads=1")
    assert hinted.stdout.endswith("To measure them: ddpdoctor try --set torch.threads=1 -- COMMAND\n")


def test_a_search_can_be_listed_without_a_job(tmp_path):
    listed = offered(tmp_path, "--tune", "ddp")
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout.endswith("To measure them: ddpdoctor try --tune ddp -- COMMAND\n")


def test_outputs_do_not_overwrite_the_script(tmp_path):
    (tmp_path / "train.py").write_text("pass\n")
    refused = offered(
        tmp_path, "--set", "torch.threads=1", "--patch", "train.py", "--", "python", "train.py", "x" * 5000
    )
    assert refused.returncode == 2
    assert refused.stderr == "ddpdoctor: --patch train.py would overwrite an input: name another file.\n"
    assert (tmp_path / "train.py").read_text() == "pass\n"


def test_proposals_of_a_run_with_command_and_expectation(tmp_path):
    shutil.copytree(ROOT / "fixtures" / "slow-data-one-rank", tmp_path / "my run")
    listed = offered(tmp_path, "my run").stdout
    assert listed.splitlines()[-1] == "To measure them: ddpdoctor try 'my run' --all -- COMMAND"
    best = next(line for line in listed.splitlines() if line.startswith("loader.num_workers="))
    settings, _, expected = best.partition("  (expected to save ")
    first = settings.split()[0]
    asked = offered(tmp_path, "my run", "--set", first, "--bounds").stdout
    assert asked.startswith(f"{first}  (expected to save {expected}\n")
    assert f"try 'my run' --set {first} --bounds --all -- COMMAND" in asked
    whole = offered(
        tmp_path, "my run", *(word for each in settings.split() for word in ("--set", each))
    ).stdout
    assert whole.count(settings) == 1, "suggested and asked for is one"


SCRIPT = """\
loader = DataLoader(data, num_workers=0)
checked = DataLoader(held_back)
model = DistributedDataParallel(net, bucket_cap_mb=25)
"""
WORKERS = {"loader.num_workers": 4}


def patched(tmp_path, settings: dict[str, object], diagnosis, script: str = SCRIPT) -> str | None:
    (tmp_path / "train.py").write_text(script)
    best = Variant(settings=settings, finding="dataloader/few", verdict="faster", change=-0.5, trials=3)
    answer = TrialsReport(baseline=Baseline(median_ms=20.0), variants=[best])
    diff = tmp_path / "a.diff"
    write_patch(answer, diagnosis, ["torchrun", str(tmp_path / "train.py"), "--lr", "1"], diff)
    return diff.read_text() if diff.exists() else None


@pytest.mark.parametrize(
    ("settings", "holds"),
    [
        (WORKERS, "+loader = DataLoader(data, num_workers=4)"),
        ({"ddp.bucket_cap_mb": 50.0}, "bucket_cap_mb=50.0"),
    ],
)
def test_a_patch_is_made_at_the_line_from_the_facts(tmp_path, settings, holds):
    file = str(tmp_path / "train.py")
    facts = Facts(
        loader=LoaderFacts(where=Where(file, 1, "main")), ddp=DdpFacts(where=Where(file, 3, "main"))
    )
    diagnosis = msgspec.structs.replace(samples.minimal(), facts=facts_view.tree(facts))
    assert holds in (patched(tmp_path, settings, diagnosis) or "")


def test_a_patch_is_made_at_the_findings_line_or_the_scripts_only_call(tmp_path):
    finding = msgspec.structs.replace(
        samples.unhealthy().findings[0], where=[Where(str(tmp_path / "train.py"), 1, "main")]
    )
    named = msgspec.structs.replace(samples.minimal(), findings=[finding])
    assert "num_workers=4" in (patched(tmp_path, WORKERS, named) or "")
    (tmp_path / "a.diff").unlink()
    assert patched(tmp_path, WORKERS, None) is None  # of two loaders, nobody said which
    one = SCRIPT.replace("checked = DataLoader(held_back)\n", "")
    assert "num_workers=4" in (patched(tmp_path, WORKERS, None, one) or "")


def test_the_scripts_call_is_not_edited_if_the_object_is_built_elsewhere(tmp_path):
    """A library's loader trains; the script's only DataLoader evaluates."""
    script = "train = FancyLoader(data)\nchecked = DataLoader(held_back)\n"
    facts = Facts(loader=LoaderFacts(where=Where(str(tmp_path / "train.py"), 1, "main")))
    diagnosis = msgspec.structs.replace(samples.minimal(), facts=facts_view.tree(facts))
    assert patched(tmp_path, WORKERS, diagnosis, script) is None


@pytest.mark.parametrize(
    ("source", "count", "steps"),
    [("step-log", 150, 149), ("step-log", 1000, 160), ("step-log", 6, 12), ("trace", 5, 160)],
)
def test_trials_are_shorter_than_the_run(source, count, steps):
    known = Steps(count=count, source=source, mean_ms=50.0)
    run = msgspec.structs.replace(samples.minimal(), steps=known)
    assert trials._trial_steps(run) == steps
    assert trials._run_steps(run) == (count if source == "step-log" else None)


def test_a_patch_keeps_line_endings(tmp_path):
    (tmp_path / "train.py").write_bytes(b"loader = DataLoader(data)\r\n")
    best = Variant(settings=WORKERS, finding="dataloader/few", verdict="faster", change=-0.5, trials=3)
    answer = TrialsReport(baseline=Baseline(median_ms=20.0), variants=[best])
    write_patch(answer, None, [str(tmp_path / "train.py")], tmp_path / "a.diff")
    assert b"-loader = DataLoader(data)\r\n" in (tmp_path / "a.diff").read_bytes()


@pytest.mark.torchrun
def test_a_job_that_cannot_be_measured_says_why(tmp_path):
    failed = tried(
        tmp_path,
        "--set",
        "torch.threads=1",
        "--rounds",
        "1",
        "--budget",
        "20",
        "--",
        sys.executable,
        "-c",
        "raise SystemExit(3)",
    )
    assert failed.returncode == 2
    assert "alternating with the unchanged job, in at most 20 s." in failed.stderr
    assert "could not be measured" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.torchrun
def test_a_setting_is_measured_against_the_unchanged_job(tmp_path):
    shutil.copytree(ROOT / "fixtures" / "slow-data-one-rank", tmp_path / "run")
    settings = ["--set", "loader.num_workers=2", "--rounds", "1", "--steps", "12", "--json", "answer.json"]
    found = tried(tmp_path, "run", *settings, "--", *forked("tried.py", "--wait-ms", "10"))
    assert found.returncode == 0, found.stderr
    assert json.loads((tmp_path / "run" / TRIALS_FILE).read_text())["variants"], (
        "kept beside the diagnosis of its run"
    )
    answer = json.loads((tmp_path / "answer.json").read_text())
    (variant,) = answer["variants"]
    assert variant["set"] == {"loader.num_workers": 2}
    assert answer["baseline"]["median_ms"] > 10 and variant["median_ms"] > 0
    assert variant["parity"]["same_bits"] is True
    assert not (tmp_path / "END").exists()
    nothing_left(tmp_path)


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.alone
def test_workers_are_faster_for_a_slow_loader_and_crashes_are_results(tmp_path):
    found = tried(
        tmp_path,
        *("--set", "loader.num_workers=4", "--set", "ddp.comm_hook=bf16", "--steps", "40"),
        *("--json", "answer.json", "--", *JOB, "--wait-ms", "10"),
    )
    assert found.returncode == 0, found.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["schema"] == "ddpdoctor.trials/1"
    faster, refused, _ = answer["variants"]
    assert (faster["verdict"], refused["verdict"]) == ("faster", "not applied")
    assert faster["median_ms"] < 0.7 * answer["baseline"]["median_ms"]
    assert faster["parity"]["same_bits"] is True
    assert not (tmp_path / "END").exists()
    assert not list(tmp_path.glob("pymp-*"))
    nothing_left(tmp_path)


@pytest.mark.torchrun
@pytest.mark.slow
def test_an_interrupt_keeps_only_the_measured_results(tmp_path):
    settings = ["--set", "torch.threads=1", "--steps", "20", "--json", "answer.json"]
    process = trying(tmp_path, tmp_path, *settings, "--", *JOB, "--wait-ms", "2")
    time.sleep(2.0)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["baseline"]["trials"] >= 1
    nothing_left(tmp_path)


def test_results_without_trials_do_not_replace_earlier_ones(tmp_path, monkeypatch):
    from ddpdoctor.cli import trials
    from ddpdoctor.experiment import Experiment, Proposal

    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "trials.json").write_text("finished")

    def run(self) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Experiment, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    given = {"steps": None, "rounds": None, "budget_s": 60.0, "copy": False, "halving": False}
    with pytest.raises(SystemExit):
        trials._measure(
            ["true"], [Proposal(WORKERS)], None, str(tmp_path), json_file=None, patch=None, **given
        )
    assert (tmp_path / "trials.json").read_text() == "finished"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_failed_write_keeps_the_earlier_results(tmp_path, monkeypatch, capsys):
    from ddpdoctor.cli import trials
    from ddpdoctor.diagnose import trials as measured_trials

    def full(report: TrialsReport, path: Path) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "manifest.json").write_text("{}")
    earlier = '{"schema": "ddpdoctor.trials/1"}'
    (tmp_path / "trials.json").write_text(earlier)
    monkeypatch.setattr(measured_trials, "write_trials", full)
    trials._store_results(TrialsReport(baseline=Baseline(median_ms=20.0)), tmp_path)
    assert (tmp_path / "trials.json").read_text() == earlier
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("job", "ranks"),
    [
        ("", None),
        ("torchrun --nproc-per-node 8 train.py", 8),
        ("torchrun --nproc_per_node=4 train.py", 4),
        ("conda run -n env torchrun --nproc-per-node 8 train.py", 8),
        ("nice -n 10 torchrun --nproc-per-node 2 train.py", 2),
        ("nice -n 10 python train.py", None),
        ("nice -n 10 mpirun -np 4 python train.py", 4),
        ("srun -n 2 torchrun --nproc-per-node 8 train.py", 8),
        ("accelerate launch --num_processes 3 train.py", 3),
        ("torchrun --nproc-per-node auto train.py -n 7", None),
        ("python train.py --num_processes 8", None),
        ("torchrun train.py --num_processes 8", None),
        ("torchrun -m pkg --num-gpus 16", None),
        ("torchrun -m --nproc-per-node 2 pkg --num-gpus 16", 2),
        ("srun -n 2 python -m torch.distributed.run --nproc-per-node 8 -m pkg --num-gpus 16", 8),
        ("mpirun -np 4 python -m pkg --np 3", 4),
        ("python /env/site-packages/torch/distributed/launch.py --nproc_per_node 4 train.py", 4),
        ("bash launch.sh --nproc-per-node 4", None),
    ],
)
def test_number_of_ranks_of_a_command(job, ranks):
    assert ranks_of_command(job.split()) == ranks


@pytest.mark.parametrize(
    ("job", "world_size", "hosts", "ranks"),
    [
        ("bash launch.sh --nproc-per-node 4", None, [], 4),
        ("bash launch.sh", 8, ["a", "b"], 4),
        ("torchrun --nproc-per-node 2 train.py", 8, ["a"], 2),
        ("bash launch.sh", None, [], 1),
    ],
)
def test_ranks_that_are_tuned_for(job, world_size, hosts, ranks):
    run = SimpleNamespace(job=SimpleNamespace(world_size=world_size, hosts=hosts))
    assert trials._ranks_here(job.split(), run) == ranks


def test_expected_savings_and_upper_bounds(capsys):
    proposals = [
        Proposal({"loader.num_workers": 4}, expected_share=0.7, expected_share_range=(0.6, 0.8)),
        Proposal({"loader.num_workers": 2}, expected_share=0.7, expected_share_range=(0.6, 1.0)),
        Proposal({"torch.threads": 1}),
    ]
    trials._list_proposals(proposals, [], "run", [])
    assert capsys.readouterr().out.splitlines() == [
        "loader.num_workers=4  (expected to save 30 % of the step time)",
        "loader.num_workers=2  (expected to save at most 40 % of the step time)",
        "torch.threads=1",
        "To measure them: ddpdoctor try run --all -- COMMAND",
    ]
