"""A small DDP job that reduces two metrics of its own in every step, or one in every evaluation, of which one rank, once, calls
something else.

``--how`` names it, ``--at`` the step. With ``--every`` there are no metrics but an evaluation before every so many steps, and ``--how``
names what the one rank does instead of it.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def small() -> None:
    dist.all_reduce(torch.ones(16))


def large() -> None:
    dist.all_reduce(torch.ones(50_000))


def usual() -> None:
    small()
    large()


def other_order() -> None:
    large()
    small()


def other_shape() -> None:
    dist.all_reduce(torch.ones(3_000))
    large()


def other_operation() -> None:
    dist.broadcast(torch.ones(70_000), 0)
    large()


def one_more() -> None:
    dist.all_reduce(torch.ones(90_000))
    usual()


def one_less() -> None:
    large()


def other_type() -> None:
    dist.all_reduce(torch.ones(16, dtype=torch.float64))
    large()


def evaluation() -> None:
    dist.all_reduce(torch.ones(1))


def left_early() -> None:
    pass


def evaluated_twice() -> None:
    evaluation()
    evaluation()


def barrier_instead() -> None:
    dist.barrier()


def buffers_left_out() -> None:
    evaluation()
    BUILT[0].modules_buffers = []


BUILT: list[DistributedDataParallel] = []


def network(buffers: bool) -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, 256), nn.BatchNorm1d(256) if buffers else nn.ReLU(), nn.Linear(256, 8)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="usual")
    parser.add_argument("--at", type=int, default=30)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--buffers", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(network(options.buffers))
    BUILT.append(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(options.steps):
        time.sleep(options.step_s)
        differs = step == options.at and rank == options.rank
        if differs and options.every:
            globals()[options.how]()
        elif options.every and step % options.every == 0:
            evaluation()
        model(torch.ones(8, 256)).sum().backward()
        if differs and not options.every:
            globals()[options.how]()
        elif not options.every:
            usual()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"took {options.steps} steps", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
