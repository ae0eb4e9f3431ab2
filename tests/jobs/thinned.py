"""Steps so short that few are recorded in full; then, in the midst of them, optimizers that step inside the backward.

Prints how many steps there were before and after that change.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BEFORE, AFTER = 1503, 801

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
data = torch.randn(2, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(BEFORE):
    optimizer.zero_grad()
    model(data).sum().backward()
    optimizer.step()

if os.environ.get("CHANGE"):
    parameters = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    for parameter in parameters:
        own = torch.optim.SGD([parameter], lr=1e-3)

        def step(_: torch.Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(AFTER):
        sum((data @ parameter).sum() for parameter in parameters).backward()  # type: ignore[union-attr]
    print(f"{BEFORE} {AFTER}")
else:
    print(f"{BEFORE} 0")
dist.destroy_process_group()
