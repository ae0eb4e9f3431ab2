"""Jobs that step their optimizer on a thread of its own, and that take back every file they did not know."""

from __future__ import annotations

import pytest

from .recording import HookOptions, forked, run_recorded

JOB = """
import os, threading, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step(number):
    optimizer.zero_grad()
    model(torch.full((4, 8), number % 5.0)).square().sum().backward()
    optimizer_step()
optimizer_step = optimizer.step
"""
IN_A_THREAD_EACH = """
def optimizer_step():
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()
for number in range(80):
    step(number)
"""
ALL_IN_ONE = """
trains = threading.Thread(target=lambda: [step(number) for number in range(20)])
trains.start()
trains.join()
"""
TAKEN_BACK = """
import sys, time
for number in range(40):
    step(number)
for handle in range(3, 256):
    try:
        place = os.readlink(f"/proc/self/fd/{handle}")
    except OSError:
        continue
    if place.startswith("/") and not place.startswith("/dev/null"):
        os.close(handle)
files = [open(os.path.join(sys.argv[1], f"{n}.txt"), "w") for n in range(30)]
until = time.monotonic() + 1.5
while time.monotonic() < until:
    step(1)
    time.sleep(0.01)
dist.destroy_process_group()
for file in files:
    file.write("result")
    file.close()
"""
END = """
if dist.is_initialized():
    dist.destroy_process_group()
print(float(sum(each.sum() for each in model.parameters()).detach()))
"""


@pytest.mark.torchrun
def test_a_thread_for_each_step_is_not_profiled(tmp_path):
    """A profiler that was opened on a thread which is gone cannot be closed any more, and crashes the process at its end."""
    script = tmp_path / "job.py"
    script.write_text(JOB + IN_A_THREAD_EACH + END)
    recorded = run_recorded(tmp_path, forked(script, ranks=1), HookOptions(profile_steps=(20, 25)))
    assert recorded.process.returncode == 0, recorded.process.stderr
    assert recorded.process.stderr == ""
    assert recorded.info(0)["window"]["state"] == "skipped"
    assert len(recorded.steps(0)) == 80


@pytest.mark.torchrun
def test_a_loop_in_a_thread_of_its_own_is_recorded(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(JOB + ALL_IN_ONE + END)
    recorded = run_recorded(tmp_path, forked(script, ranks=1), HookOptions(profile_steps=None))
    assert recorded.process.returncode == 0, recorded.process.stderr
    kinds = [{event["k"] for event in step["ev"]} for step in recorded.steps(0)]
    assert len(kinds) == 20 and all(each >= {"fwd", "bwd", "opt"} for each in kinds[1:])


@pytest.mark.torchrun
@pytest.mark.extended
def test_files_of_the_jobs_under_numbers_of_ours_stay_open(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(JOB + TAKEN_BACK + END)
    command = forked(script, str(tmp_path), ranks=1)
    recorded = run_recorded(tmp_path, command, HookOptions(profile_steps=None))
    assert recorded.process.returncode == 0, recorded.process.stderr
    assert {(tmp_path / f"{n}.txt").read_text() for n in range(30)} == {"result"}
    assert recorded.info(0)["hook"]["errors"] == []
