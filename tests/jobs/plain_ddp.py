"""A DDP job that runs anywhere: a small network on Gloo. It prints what a test compares, and counts its own
steps.

    torchrun --nproc-per-node 2 plain_ddp.py [--steps N] [--shape NAME] [--workers N] [--out FILE] ...

``--out`` gets one JSON object per rank (``FILE.<rank>``): the loop's own count of steps, and a hash of the
parameters.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WIDTH = 16


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--context", default=None, help="start method of the data loader's workers")
    parser.add_argument(
        "--slow-rank", type=int, default=-1, help="this rank computes longer before each forward"
    )
    parser.add_argument("--slow-ms", type=float, default=30.0)
    parser.add_argument("--barrier", action="store_true")
    parser.add_argument("--more-ops", type=int, default=0, help="operations without gradients in each step")
    parser.add_argument("--out", default="")
    parser.add_argument(
        "--exit-hard",
        action="store_true",
        help="end in order, but without the teardown of Gloo, which sometimes aborts",
    )
    return parser.parse_args()


def network(width: int, layers: int) -> nn.Sequential:
    """A stack of linear layers with dropout, so that a wrong random state would show."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*parts, nn.Linear(width, 1))


def digest(module: nn.Module) -> str:
    """A hash of all parameters' bits."""
    found = hashlib.sha256()
    for parameter in module.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    options = arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(network(WIDTH, options.layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dataset = TensorDataset(torch.randn(512, WIDTH), torch.randn(512, 1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset,
        batch_size=8,
        sampler=sampler,
        num_workers=options.workers,
        multiprocessing_context=options.context,
    )
    steps = epoch = 0
    torch.manual_seed(rank)
    while steps < options.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for data, target in loader:
            if rank == options.slow_rank:
                time.sleep(options.slow_ms / 1000)
            for _ in range(options.more_ops):
                target.abs()
            loss = nn.functional.mse_loss(model(data), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if options.barrier:
                dist.barrier()
            steps += 1
            if steps >= options.steps:
                break
    if options.out:
        with open(f"{options.out}.{rank}", "w") as out:
            json.dump({"steps": steps, "digest": digest(model)}, out)
    if rank == 0:
        print(f"done {steps}")
    dist.barrier()
    if options.exit_hard:
        sys.stdout.flush()
        atexit._run_exitfuncs()
        os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
