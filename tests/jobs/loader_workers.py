"""A DDP job whose data loader's workers are slow at a known line.

``--at`` says where: in the dataset, in ``collate_fn``, in an iterable dataset, or in a transform that the dataset calls;
``--how`` in which way: sleeping, computing in Python, computing in numpy without the GIL, or reading a file.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

WIDTH = 16


def sleeps(seconds: float) -> None:
    time.sleep(seconds)


def computes(seconds: float) -> None:
    ends = time.monotonic() + seconds
    total = 0
    while time.monotonic() < ends:
        total += sum(i * i for i in range(100))


def multiplies(seconds: float) -> None:
    ends = time.monotonic() + seconds
    matrix = np.random.rand(200, 200)
    while time.monotonic() < ends:
        matrix = matrix @ matrix / 100


WAYS = {"sleep": sleeps, "python": computes, "numpy": multiplies}


class Slow:
    """Takes so long, in the worker and on the rank that are slow."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.way, self.seconds = options.how, options.slow_ms / 1e3
        self.worker = options.slow_worker
        if options.slow_rank >= 0 and options.slow_rank != rank:
            self.seconds = 0.0

    def __call__(self) -> None:
        info = get_worker_info()
        if self.seconds and (self.worker < 0 or info is None or info.id == self.worker):
            WAYS[self.way](self.seconds)


class Items(Dataset):
    def __init__(self, slow: Slow | None, size: int, transform: Transform | None = None) -> None:
        self.slow, self.size, self.transform = slow, size, transform

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow is not None:
            self.slow()
        item = torch.full((WIDTH,), float(index))
        return item if self.transform is None else self.transform(item)


class Transform:
    def __init__(self, slow: Slow) -> None:
        self.slow = slow

    def __call__(self, item: torch.Tensor) -> torch.Tensor:
        self.slow()
        return item * 2


class Stream(IterableDataset):
    def __init__(self, slow: Slow, size: int) -> None:
        self.slow, self.size = slow, size

    def __iter__(self):
        info = get_worker_info()
        for index in range(info.id, self.size, info.num_workers):
            self.slow()
            yield torch.full((WIDTH,), float(index))


class Collate:
    def __init__(self, slow: Slow) -> None:
        self.slow = slow

    def __call__(self, items: list[torch.Tensor]) -> torch.Tensor:
        self.slow()
        return torch.stack(items)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--at", choices=("item", "collate", "stream", "transform"), default="item")
    parser.add_argument("--how", choices=sorted(WAYS), default="sleep")
    parser.add_argument("--slow-ms", type=float, default=20.0)
    parser.add_argument("--slow-worker", type=int, default=-1)
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--context", default=None)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--persistent", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    slow = Slow(options, rank)
    size = 2 * options.steps
    data = {
        "item": lambda: Items(slow, size),
        "transform": lambda: Items(None, size, Transform(slow)),
        "stream": lambda: Stream(slow, size),
        "collate": lambda: Items(None, size),
    }[options.at]()
    loader = DataLoader(
        data,
        batch_size=2,
        num_workers=options.workers,
        collate_fn=Collate(slow) if options.at == "collate" else None,
        multiprocessing_context=options.context,
        persistent_workers=options.persistent,
    )
    model = DistributedDataParallel(nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for _ in range(options.epochs):
        for batch in loader:
            if options.step_ms:
                computes(options.step_ms / 1e3)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    print(f"rank {rank} done", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
