"""Ranks started by ``torch.multiprocessing.spawn``: their rank is known only once they call
``init_process_group``. With the argument ``raises`` one of them does.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing
from tiny_ddp import end_in_order
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def reading() -> None:
    raise ValueError("a bad sample")


def work(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    if rank == 1 and "raises" in sys.argv:
        reading()
    end_in_order()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(os.path.join(folder, "store"),), nprocs=2)
    print("parent done")
