"""Processes that the job forks while the profiler window is open."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.hook.recording import HookOptions, forked, run_recorded

JOB = """
import resource
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

OPERATORS = 200_000

class Items(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 1:
            with torch.profiler.profile() as profiler:
                torch.abs(one)
            return sum(event.name == "aten::abs" for event in profiler.events())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(OPERATORS if index == 0 else 0):
            torch.neg(one)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

one = torch.ones(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    model(torch.ones(2)).sum().backward()
    optimizer.step()

for _ in range(4):
    step()
found = []
for number in DataLoader(Items(), num_workers=1):
    found.append(int(number))
    step()
print(*found[:2])
"""


@pytest.mark.torchrun
def test_a_worker_records_nothing_but_what_it_asks_for_itself(tmp_path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    command = forked(tmp_path / "job.py", ranks=0)
    recorded = run_recorded(tmp_path, command, HookOptions(profile_steps=(2, 20)))
    assert recorded.process.returncode == 0, recorded.process.stderr
    grown_kib, own_profiler = map(int, recorded.process.stdout.split())
    assert grown_kib < 4096 and own_profiler > 0
    assert recorded.info(0)["window"]["state"] == "saved"
    with gzip.open(recorded.folder(0) / "trace.json.gz") as source:
        names = [event.get("name") for event in json.load(source)["traceEvents"]]
    assert names.count("aten::addmv") + names.count("aten::linear") >= 18
