"""A DDP job on Gloo whose memory does what it is told to; it sleeps most of the time.

    torchrun --nproc-per-node 2 memory_use.py [--leak MB] [--worker-leak MB] [--hold MB] [--slows] [--healthy] [--seconds S]

Of the last rank: ``--leak`` keeps so many MB of tensors in each step, ``--hold`` holds so many from the start. Of rank 0,
``--worker-leak`` has each item of the data set keep so many MB in its worker. ``--slows`` makes a step take three times as long from
the middle on, as on a machine that somebody else begins to use. ``--healthy`` is all that looks like a leak and is
none, on all ranks: a data set that caches in the first pass, a history of bounded length, outputs of an evaluation that are kept
until it is over, tensors of all sizes.
"""

from __future__ import annotations

import argparse
import collections
import time

import torch
import torch.distributed as dist
from tiny_ddp import end_in_order
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

MB = 1 << 20
ITEMS = 40
EVALUATE_EVERY_S = 3.0


def megabytes(count: float) -> torch.Tensor:
    return torch.ones(int(count * MB) // 4)


class Data(Dataset[torch.Tensor]):
    def __init__(self, kept_mb: float, cached_mb: float, length: int) -> None:
        self.kept_mb, self.cached_mb, self.length = kept_mb, cached_mb, length
        self.kept: list[torch.Tensor] = []
        self.cache: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.kept_mb:
            self.kept.append(megabytes(self.kept_mb))
        if self.cached_mb and index not in self.cache:
            self.cache[index] = megabytes(self.cached_mb)
        return torch.ones(8)


def batches(loader: DataLoader[torch.Tensor]):
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--leak", type=float, default=0.0)
    parser.add_argument("--worker-leak", type=float, default=0.0)
    parser.add_argument("--hold", type=float, default=0.0)
    parser.add_argument("--slows", action="store_true")
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--seconds", type=float, default=32.0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    last = rank == dist.get_world_size() - 1
    worker_leak = options.worker_leak if rank == 0 else 0.0
    # A pass takes two seconds where the data set caches, else there is only one.
    data = Data(worker_leak, 4.0 if options.healthy else 0.0, ITEMS if options.healthy else 100_000)
    workers = {"num_workers": 1, "persistent_workers": True} if options.worker_leak else {}
    loader = DataLoader(data, shuffle=options.healthy, **workers)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    held = megabytes(options.hold if last else 0.0)
    kept: list[torch.Tensor] = []
    history: collections.deque[torch.Tensor] = collections.deque(maxlen=100)
    begun, evaluated, go_on = time.monotonic(), time.monotonic(), torch.ones(1)
    for step, batch in enumerate(batches(loader)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if last and options.leak:
            kept.append(megabytes(options.leak))
        if options.healthy:
            history.append(megabytes(0.5))
            megabytes(1 + step * 7 % 23)
            if time.monotonic() - evaluated > EVALUATE_EVERY_S:
                outputs = []
                for _ in range(10):
                    outputs.append(megabytes(8))
                    time.sleep(0.02)
                evaluated = time.monotonic()
        slow = options.slows and time.monotonic() - begun > options.seconds / 2
        time.sleep(0.15 if slow else 0.05)
        if step % 10 == 0:
            go_on[0] = float(time.monotonic() - begun < options.seconds)
            dist.broadcast(go_on, 0)
            if not go_on:
                break
    assert held.numel() >= 0
    end_in_order()


if __name__ == "__main__":
    main()
