"""Steps so short that few are recorded in full, and then process groups that are made, used once and destroyed, one after the other.

Prints the groups' names; then the process is killed.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parameter = nn.Parameter(torch.zeros(2))
optimizer = torch.optim.SGD([parameter], lr=1e-3)
value = torch.ones(1)
names = []
for step in range(1500):
    parameter.sum().backward()
    optimizer.step()
    if step >= 1490:
        group = dist.new_group([0])
        dist.all_reduce(value, group=group)
        names.append(group.group_name)
        dist.destroy_process_group(group)
        del group
print(*names, flush=True)
os.kill(os.getpid(), 9)
