"""Regression with a multilayer perceptron: one file, one loop."""

import argparse
import time  # noqa: F401

import torch
import torch.distributed as dist
from accelerator import kernel
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

# slot: top


class Table(Dataset):
    def __init__(self, rows, rank):
        self.x = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
        self.rows, self.rank = rows, rank

    def __len__(self):
        return self.rows

    def __getitem__(self, i):
        x = self.x[i % 512]
        # slot: dataset rank=self.rank
        return x, x.sum()


class Regressor(nn.Module):
    def __init__(self, width, depth, step_ms, samples):
        super().__init__()
        self.first = nn.Linear(64, width)
        self.hidden = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
        )
        self.last = nn.Linear(width, 1)
        self.step_ms, self.samples = step_ms, samples

    def forward(self, x):
        h = kernel(torch.relu(self.first(x)), self.step_ms, self.samples)
        # slot: forward rank=dist.get_rank() var=h
        h = self.hidden(h)
        return self.last(h).squeeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    batch_size = args.batch
    # slot: setup rank=rank
    data = Table(2 * args.batch * args.steps * dist.get_world_size(), rank)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)  # the loader
    model = DistributedDataParallel(Regressor(args.width, args.depth, args.step_ms, args.batch))  # the model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loss_fn = nn.MSELoss()

    for step, (x, y) in enumerate(loader):  # the loader
        if step == args.steps:
            break
        # slot: loop_start rank=rank
        prediction = model(x)
        loss = loss_fn(prediction, y)
        # slot: between rank=rank
        optimizer.zero_grad()
        loss.backward()
        # slot: after_backward rank=rank
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(step, loss.item(), flush=True)
        # slot: loop_end rank=rank

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
