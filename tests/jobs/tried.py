"""A DDP job whose settings can be tried: a loader that waits, two micro-batches if asked, barriers.

    torchrun --nproc-per-node 2 tried.py [--iterable | --sharded] [--own-hook] [--micro 2] [--barrier] [--batches N]
        [--wait-ms M | --busy-ms M] [--iterable-on 1] [--second] [--no-loader] [--draws item | worker | sampler]
        [--short-on 1 [--join]] [--own-precision]

At its end it writes END into its working directory, which no trial may reach.
"""

from __future__ import annotations

import argparse
import random
import time
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info


class Items(Dataset):
    def __init__(self, length: int, wait_ms: float, busy_ms: float, draws: str) -> None:
        self.length, self.wait_s, self.busy_s, self.draws = length, wait_ms / 1e3, busy_ms / 1e3, draws

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.wait_s)
        until_s = time.thread_time() + self.busy_s
        while time.thread_time() < until_s:
            pass
        item = torch.full((64,), float(index % 17))
        if self.draws == "item":
            item += torch.rand(64)
        elif self.draws == "worker":
            item += random.random()
        return item, index % 10


def seeded_by_worker(number: int) -> None:
    random.seed(number)


class Growing(DistributedSampler):
    """Goes on to harder items as training gets on, of which a loader that runs ahead knows less."""

    steps_taken = 0

    def __iter__(self):
        for index in super().__iter__():
            yield (index + 3 * Growing.steps_taken) % len(self.dataset)


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
    switches = ("--iterable", "--sharded", "--own-hook", "--barrier", "--fails-with-workers", "--second")
    for switch in (*switches, "--no-loader", "--join", "--own-precision"):
        parser.add_argument(switch, action="store_true")
    parser.add_argument("--iterable-on", type=int)
    parser.add_argument("--short-on", type=int)
    parser.add_argument("--draws", default="")
    parser.add_argument("--busy-ms", type=float, default=0.0)
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--wait-ms", type=float, default=0.0)
    options = parser.parse_args()
    if options.own_precision:
        torch.backends.cuda.matmul.fp32_precision = (
            "tf32"  # after which torch names no precision of all backends
        )
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(net, find_unused_parameters=True)
    if options.own_hook:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    random.seed(7)
    length = 8 * options.batches * dist.get_world_size()
    data = Items(length, options.wait_ms, options.busy_ms, options.draws)
    if options.no_loader:
        loader = [(torch.full((8, 64), 1.0), torch.zeros(8, dtype=torch.long))] * options.batches
    elif options.iterable or options.sharded or options.iterable_on == dist.get_rank():
        loader = DataLoader(Sharded() if options.sharded else Stream(), batch_size=8)
    else:
        sampler = Growing if options.draws == "sampler" else DistributedSampler
        begin = seeded_by_worker if options.draws == "worker" else None
        loader = DataLoader(
            data, 8, sampler=sampler(data, shuffle=False), num_workers=0, worker_init_fn=begin
        )
    if options.second:
        next(iter(DataLoader(Items(64, 0.0, 0.0, ""), 8)))
    if options.fails_with_workers and loader.num_workers:
        raise RuntimeError("this data set cannot be sent to workers")
    batches = options.batches // (2 if options.short_on == dist.get_rank() else 1)
    with model.join() if options.join else nullcontext():
        for number, (inputs, labels) in enumerate(islice(loader, batches), start=1):
            nn.functional.cross_entropy(model(inputs), labels).backward()
            if number % options.micro == 0:
                optimizer.step()
                optimizer.zero_grad()
                Growing.steps_taken += 1
            if options.barrier:
                dist.barrier()
    Path("END").write_text("reached")
    dist.destroy_process_group()


main()
