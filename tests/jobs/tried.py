"""A DDP job whose settings can be tried: a loader that waits, two micro-batches if asked, barriers.

    torchrun --nproc-per-node 2 tried.py [--iterable | --sharded] [--own-hook] [--micro 2] [--barrier] [--batches N] [--wait-ms M]

At its end it writes END into its working directory, which no trial may reach.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info


class Items(Dataset):
    def __init__(self, length: int, wait_ms: float) -> None:
        self.length, self.wait_s = length, wait_ms / 1e3

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.wait_s)
        return torch.full((64,), float(index % 17)), index % 10


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(10_000):
            yield torch.full((64,), float(index % 17)), index % 10


class Sharded(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, 10_000, step):
            yield torch.full((64,), float(index % 17)), index % 10


def main() -> None:
    parser = argparse.ArgumentParser()
    for switch in ("--iterable", "--sharded", "--own-hook", "--barrier", "--fails-with-workers"):
        parser.add_argument(switch, action="store_true")
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--wait-ms", type=float, default=0.0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(net, find_unused_parameters=True)
    if options.own_hook:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if options.iterable or options.sharded:
        loader = DataLoader(Sharded() if options.sharded else Stream(), batch_size=8)
    else:
        data = Items(8 * options.batches * dist.get_world_size(), options.wait_ms)
        loader = DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False), num_workers=0)
    if options.fails_with_workers and loader.num_workers:
        raise RuntimeError("this data set cannot be sent to workers")
    for number, (inputs, labels) in enumerate(loader, start=1):
        nn.functional.cross_entropy(model(inputs), labels).backward()
        if number % options.micro == 0:
            optimizer.step()
            optimizer.zero_grad()
        if options.barrier:
            dist.barrier()
    Path("END").write_text("reached")
    dist.destroy_process_group()


main()
