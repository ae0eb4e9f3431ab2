"""``ddpdoctor capture`` and ``ddpdoctor stacks`` on real ranks that train meanwhile."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddpdoctor.rundir import present_ranks

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
DOCTOR = [sys.executable, "-m", "ddpdoctor"]
JOB = str(ROOT / "ddpdoctor" / "demo" / "job.py")


def doctor(*arguments, timeout_s=240):
    done = subprocess.run(
        [*DOCTOR, *map(str, arguments)], capture_output=True, text=True, timeout=timeout_s, env=ENVIRONMENT
    )
    return done.returncode, done.stdout, done.stderr


def steps_of(run, rank):
    try:
        text = (run / "ranks" / f"{rank:05d}" / "steps.jsonl").read_text()
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"step"')]


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """A job of two ranks that was asked for stacks and for a window; what both commands said."""
    pytest.importorskip("torch")
    run = tmp_path_factory.mktemp("capture") / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = [*torchrun, JOB, "--fault", "slow-data-one-rank", "--steps", "100000"]
    launcher = subprocess.Popen(
        [*DOCTOR, "run", "--out", str(run), "--no-analysis", "--", *job],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while min(len(steps_of(run, rank)) for rank in range(2)) < 60:
            assert time.monotonic() < deadline and launcher.poll() is None
            time.sleep(0.5)
        stacks, verbose = doctor("stacks", run), doctor("stacks", run, "-v")
        capture = doctor("capture", run, "--steps", "5")
        assert launcher.poll() is None
    finally:
        for rank in present_ranks(str(run)):
            os.kill(rank.pid, 15)
        launcher.wait(60)
    return run, stacks, verbose, capture


@pytest.mark.torchrun
def test_all_ranks_open_the_window_in_the_same_steps(captured):
    run, _, _, (code, out, err) = captured
    assert (code, err) == (0, ""), (out, err)
    first, last = map(int, re.search(r"window 1: steps (\d+) to (\d+), on 2 ranks", out).groups())
    assert last == first + 4 and "2 traces saved; `ddpdoctor analyze" in out
    for rank in range(2):
        assert (run / "ranks" / f"{rank:05d}" / "trace.1.json.gz").stat().st_size > 1000
        assert (run / "ranks" / f"{rank:05d}" / "trace.json.gz").stat().st_size > 1000
        profiled = [line["step"] for line in steps_of(run, rank) if "profiled" in line.get("marks", [])]
        assert profiled[-5:] == list(range(first, last + 1)) and profiled[-6] < first - 10


@pytest.mark.torchrun
def test_the_window_is_analysed_and_the_first_one_as_before(captured):
    run = captured[0]
    code, out, _ = doctor("analyze", run, "--window", "1", "--json", "-", "-q")
    assert code == 0
    diagnosis = json.loads(out)
    # It was ended from outside, which comes first.
    assert any(finding["ranks"] == [1] and finding["share"] for finding in diagnosis["findings"])
    window = diagnosis["steps"]["window"]
    assert window["last"] - window["first"] < 20, "the first window's cost, not that up to the capture"
    code, _, err = doctor("analyze", run, "--window", "3")
    assert code == 2 and "there is no window 3: " in err and err.rstrip().endswith("has 1.")


@pytest.mark.torchrun
def test_stacks_say_where_each_rank_is(captured):
    _, (code, out, err), (_, verbose, _), _ = captured
    assert (code, err) == (0, "")
    assert re.findall(r"^rank (\d) \(process \d+\) in step [\d,]+ for [\d.]+ s: \w+$", out, re.MULTILINE) == [
        "0",
        "1",
    ]
    assert "job.py:" in out and "site-packages" not in out
    assert "(trains):" in verbose and len(verbose.splitlines()) > len(out.splitlines())


def test_who_does_not_run_is_not_asked(tmp_path):
    for command in ("stacks", "capture"):
        code, out, err = doctor(command, ROOT / "fixtures" / "healthy")
        assert (code, out) == (2, "") and "has ended: `ddpdoctor analyze" in err
        code, out, err = doctor(command, tmp_path)
        assert (
            (code, out) == (2, "") and "no run directory" in err
        ) or "not a ddpdoctor run directory" in err
