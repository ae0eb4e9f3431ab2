"""A DDP job of one rank whose threads fork, without exec, children that outlive their thread by far, while it trains.

    torchrun --nproc-per-node 1 forking.py [--steps N] [--children N]

The children are ended when the process group is gone.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

THREADS, CHILDREN = 3, 20


def fork_children(count: int, children: list[int]) -> None:
    for _ in range(count):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(300)
            os._exit(0)
        children.append(child)
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    children: list[int] = []
    threads = [threading.Thread(target=fork_children, args=(CHILDREN, children)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    steps = 0
    while steps < options.steps or any(thread.is_alive() for thread in threads):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        steps += 1
        time.sleep(0.005)
    dist.destroy_process_group()
    for child in children:
        os.kill(child, signal.SIGKILL)
    print(f"took {steps} steps, forked {len(children)}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
