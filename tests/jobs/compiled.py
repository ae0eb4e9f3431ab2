"""A DDP job whose model and optimizer are compiled; prints how many graphs there were.

torchrun --nproc-per-node 1 compiled.py [--backend NAME]
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="aot_eager")
    backend = parser.parse_args().backend
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    model = torch.compile(ddp, backend=backend)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend=backend)
    for _ in range(6):
        optimizer.zero_grad()
        value = model(torch.ones(2, 4)).square().mean()
        value.backward()
        step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"graphs {graphs} loss {value.item():.9f}")
    sys.stdout.flush()
    atexit._run_exitfuncs()
    os._exit(0)


if __name__ == "__main__":
    main()
