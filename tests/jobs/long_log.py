"""A job whose log outgrows its budget on disk, which the first argument gives in bytes; the second: how many steps."""

from __future__ import annotations

import sys
import time

import _ddpdoctor.rundir.compaction as compaction  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

compaction.MOST_RANK_BYTES = compaction.LEAST_RANK_BYTES = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.randn(2, 4)
for step in range(int(sys.argv[2])):
    if step % 1000 == 999:
        time.sleep(1.5)  # a log is looked at once a second
    optimizer.zero_grad()
    model(data).sum().backward()
    optimizer.step()
dist.destroy_process_group()
