"""The only rank of a job builds an index in Python before its first step, which collects garbage hundreds of times."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
gc.freeze()  # torch's own objects, which would make each collection ten times as long
index = [{"path": str(number), "box": [number]} for number in range(30_000)]
for _ in range(300):
    gc.collect()
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
print(len(index))
dist.destroy_process_group()
