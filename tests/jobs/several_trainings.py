"""Three trainings in the same processes, one after the other, as in a sweep: each makes its process group and model anew. The second
one sleeps in each step."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(width, steps, pause_s):
    # With one store for all, a rank may read addresses of the process group before.
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{os.getcwd()}/group{width}", rank=rank, world_size=world_size
    )
    model = DistributedDataParallel(nn.Linear(width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        time.sleep(pause_s)  # line of 22
        model(torch.randn(8, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


train(8, 30, 0.0)
train(16, 40, 0.03)
train(32, 30, 0.0)
