"""A profiler window that is asked for while the job runs, in a job of one process."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from ddpdoctor.hook.environment import HookOptions, job_environment
from ddpdoctor.launch.leftovers import drain_spools
from ddpdoctor.rundir import CAPTURE_ANSWER, CAPTURE_ORDER
from ddpdoctor.rundir.requests import CaptureRequest, answer_of, delete_requests, request_capture
from ddpdoctor.rundir.spool import make_spool_root, spools_in
from tests.hook.recording import forked, plain_environment
from tests.waiting import until

pytest.importorskip("torch")
pytestmark = pytest.mark.torchrun

JOB = """
import os, time
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while not os.path.exists("stop"):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
"""
ANSWER_S, SAVED_S = 30.0, 60.0


class Job:
    """A job of one process that trains until it is told to stop, with a first window of its own."""

    def __init__(self, tmp, window=(3, 6)):
        self.tmp, self.run = tmp, tmp / "run"
        self.run.mkdir()
        (tmp / "job.py").write_text(JOB)
        self.root = make_spool_root(str(self.run))
        options = HookOptions(profile_steps=window, hang_after_s=60.0)
        self.process = subprocess.Popen(
            forked(tmp / "job.py", ranks=0),
            env=job_environment(str(self.run), self.root, options, plain_environment()),
            cwd=tmp,
            stderr=subprocess.PIPE,
            text=True,
        )
        until(lambda: spools_in(self.root) and self.step() > 8)
        (self.spool,) = spools_in(self.root)

    @property
    def folder(self):
        return self.run / "ranks" / "00000"

    def lines(self):
        try:
            texts = (self.folder / "steps.jsonl").read_text().splitlines()
        except OSError:
            return []
        return [line for line in map(json.loads, texts) if "step" in line]

    def step(self):
        return self.lines()[-1]["step"] if self.lines() else 0

    def state(self, number):
        info = json.loads((self.folder / "rank.json").read_text())
        return next((each for each in info.get("captures", []) if each["number"] == number), {})

    def order(self, request, number, first, steps):
        request_capture(self.spool, CaptureRequest(request, number, first, steps))
        return until(lambda: answer_of(self.spool, CAPTURE_ANSWER, request), within_s=ANSWER_S)

    def end(self):
        (self.tmp / "stop").touch()
        _, err = self.process.communicate(timeout=60)
        drain_spools(Path(self.root), run=self.run)
        return self.process.returncode, err


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


def test_a_window_is_kept_beside_the_first_and_holds_the_steps_that_were_asked_for(job):
    until(lambda: (job.folder / "trace.json.gz").exists(), within_s=SAVED_S)
    before = (job.folder / "trace.json.gz").read_bytes()
    first = job.step() + 150
    assert job.order(1, 1, first, 3)["why"] is None
    until(lambda: job.state(1).get("state") == "saved", within_s=SAVED_S)
    second = job.step() + 150
    assert job.order(2, 2, second, 2)["why"] is None
    until(lambda: job.state(2).get("state") == "saved", within_s=SAVED_S)
    code, err = job.end()
    assert (code, err) == (0, "")
    assert (job.folder / "trace.json.gz").read_bytes() == before
    for number, begin, steps in ((1, first, 3), (2, second, 2)):
        trace = json.loads(gzip.decompress((job.folder / f"trace.{number}.json.gz").read_bytes()))
        names = [event.get("name", "") for event in trace["traceEvents"]]
        # The optimizer's step that ends the last one is still open when the profiler closes.
        assert names.count("aten::addmm") == steps and trace["ddpdoctor"]["rank"] == 0
        assert job.state(number)["steps"] == [begin, begin + steps]
    profiled = [line["step"] for line in job.lines() if "profiled" in line.get("marks", [])]
    assert profiled == [3, 4, 5, *range(first, first + 3), *range(second, second + 2)]


@pytest.mark.extended
def test_an_order_that_comes_too_late_or_twice_is_refused(job):
    answer = job.order(1, 1, 2, 3)
    assert "is in step" in answer["why"] and job.state(1) == {}
    far = job.step() + 100_000
    assert job.order(2, 1, far, 3)["why"] is None
    assert job.order(3, 2, far, 3)["why"] == "another window of the profiler is under way"
    delete_requests(job.spool, 3, CAPTURE_ORDER)
    until(lambda: job.state(1).get("state") == "skipped")
    assert job.state(1)["why"] == "it was taken back"
    assert job.order(4, 1, job.step() + 100_000, 3)["why"] == "it has a window 1 already"
    code, err = job.end()
    assert (code, err) == (0, "")
    assert not (job.folder / "trace.1.json.gz").exists()


@pytest.mark.extended
def test_a_job_that_ends_in_a_window_saves_it_or_says_why(job):
    assert job.order(1, 1, job.step() + 60, 64)["why"] is None
    until(lambda: job.state(1).get("state") == "open")
    code, err = job.end()
    assert (code, err) == (0, "")
    assert job.state(1)["state"] in ("saved", "saving") and "cut short" in job.state(1)["why"]
