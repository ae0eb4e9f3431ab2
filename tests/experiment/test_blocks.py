"""A job that does not get through all of its blocks keeps what was measured in those before."""

from __future__ import annotations

import sys

import pytest

from ddpdoctor.experiment import Command, running
from tests.hook.recording import plain_environment

SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
loader = DataLoader(torch.ones(400, 1), batch_size=1)
for number, batch in enumerate(loader, start=1):
    net(batch).sum().backward()
    optimizer.step()
    if number == 55:
        if "killed" in sys.argv:
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGKILL)
        break
"""
BLOCKS = [{}, {"loader.num_workers": 1}, {}, {"loader.num_workers": 2}, {}]


@pytest.mark.parametrize(
    ("how", "why", "ended_after"),
    [
        ("killed", "it ended with signal 9", None),
        ("ended", "it came to its own end after 55 steps", 55),
    ],
)
def test_finished_blocks_are_kept(tmp_path, monkeypatch, how, why, ended_after):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(SCRIPT)
    command = Command([sys.executable, "job.py", how], plain_environment(RANK="0", WORLD_SIZE="1"))
    *finished, last = running.run_blocks(command, BLOCKS, 12, 120.0)
    assert [set(trial.changes) for trial in finished] == [set(block) for block in BLOCKS[:4]]
    assert all(len(trial.step_ms) for trial in finished[1:])
    assert (last.why, last.ended_after, len(last.step_ms)) == (why, ended_after, 0)
