"""Gradient accumulation over four micro-batches that a generator makes."""

import argparse
import contextlib
import time  # noqa: F401

import torch
import torch.distributed as dist
from accelerator import kernel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# slot: top

MICRO_BATCHES = 4


def samples(batch_size, rank):
    generator = torch.Generator().manual_seed(rank)
    while True:
        x = torch.randn(batch_size, 32, generator=generator)
        # slot: generator rank=rank
        yield x, (x > 0).float().mean(1)


class Model(nn.Module):
    def __init__(self, width, step_ms, batch_size):
        super().__init__()
        self.inputs = nn.Linear(32, width)
        self.middle = nn.Linear(width, width)
        self.outputs = nn.Linear(width, 1)
        self.step_ms, self.batch_size = step_ms, batch_size

    def forward(self, x):
        x = torch.tanh(self.inputs(x))
        # slot: forward rank=dist.get_rank() var=x
        x = kernel(x, self.step_ms / MICRO_BATCHES, self.batch_size)
        x = torch.tanh(self.middle(x))
        return self.outputs(x).squeeze(1)


def run(args):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(args.width, args.step_ms, args.batch))  # the model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stream = samples(args.batch, rank)
    for step in range(args.steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(MICRO_BATCHES):
            x, y = next(stream)
            last = micro == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.mse_loss(model(x), y) / MICRO_BATCHES
                loss.backward()  # the backward pass
            total += loss.item()
        # slot: after_backward rank=rank
        optimizer.step()
        # slot: loop_end rank=rank
        if rank == 0 and step % 20 == 0:
            print(f"{step}: {total:.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    dist.init_process_group("gloo")
    try:
        run(parser.parse_args())
    finally:
        dist.destroy_process_group()


main()
