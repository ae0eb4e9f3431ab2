"""Ranks started by torch.multiprocessing.spawn, two-tower matching, metrics logged now and then."""

import argparse
import logging
import os
import time  # noqa: F401

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerator import kernel
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

log = logging.getLogger("train")

# slot: top


class Pairs:
    def __init__(self, count, rank):
        self.count, self.rank = count, rank

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        left = torch.full((24,), index % 7 / 7)
        # slot: dataset rank=self.rank
        return {"left": left, "right": left.flip(0), "score": left.mean()}


class Towers(nn.Module):
    def __init__(self, step_ms, batch):
        super().__init__()
        self.left, self.right = nn.Linear(24, 48), nn.Linear(24, 48)
        self.norm = nn.LayerNorm(48)
        self.step_ms, self.batch = step_ms, batch

    def encode(self, tower, x):
        return kernel(self.norm(tower(x)), self.step_ms / 2, self.batch)

    def forward(self, left, right):
        a = self.encode(self.left, left)
        # slot: forward rank=dist.get_rank() var=a
        b = self.encode(self.right, right)
        return (a * b).mean(1)


def setup(rank, world, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world)


def worker(rank, world, args):
    setup(rank, world, args.port)
    torch.manual_seed(0)
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    batch_size = args.batch
    # slot: setup rank=rank
    dataset = Pairs(2 * args.steps * args.batch * world, rank)
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size, sampler=sampler, drop_last=True)  # the loader
    model = DDP(Towers(args.step_ms, args.batch))  # the model
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    running = torch.zeros(2)
    data = iter(loader)
    for step in range(1, args.steps + 1):
        batch = next(data)  # the loader
        # slot: loop_start rank=rank
        score = model(batch["left"], batch["right"])
        loss = (score - batch["score"]).square().mean()
        # slot: between rank=rank
        loss.backward()
        # slot: after_backward rank=rank
        optimizer.step()
        optimizer.zero_grad()
        running += torch.tensor([loss.item(), 1.0])
        if step % 30 == 0:
            dist.all_reduce(running)
            log.info("step %d loss %.4f", step, running[0] / running[1])
            running.zero_()
        # slot: loop_end rank=rank
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--port", type=int, default=29555)
    arguments = parser.parse_args()
    mp.spawn(worker, args=(arguments.ranks, arguments), nprocs=arguments.ranks)
