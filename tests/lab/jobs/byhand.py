"""A recurrent network without DDP: gradients are averaged by hand, parameter by parameter."""

import argparse
import time  # noqa: F401

import torch
import torch.distributed as dist
from accelerator import kernel
from torch import nn

# slot: top


class Tagger(nn.Module):
    def __init__(self, step_ms, batch):
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.tag = nn.Linear(16, 5)
        self.step_ms, self.batch = step_ms, batch

    def forward(self, words):
        hidden, _ = self.gru(self.embed(words))
        hidden = kernel(hidden, self.step_ms, self.batch)
        # slot: forward rank=dist.get_rank() var=hidden
        return self.tag(hidden)


def batches(batch, rank):
    torch.manual_seed(rank)
    while True:
        words = torch.randint(100, (batch, 12))
        # slot: generator rank=rank
        yield words, words % 5


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # averaging by hand
        parameter.grad /= dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Tagger(args.step_ms, args.batch)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    stream = batches(args.batch, rank)
    step = 0
    while step < args.steps:
        words, tags = next(stream)
        optimizer.zero_grad()
        scores = model(words)
        loss = criterion(scores.flatten(0, 1), tags.flatten())
        # slot: between rank=rank
        loss.backward()
        # slot: before_average rank=rank
        average_gradients(model)
        # slot: after_backward rank=rank
        optimizer.step()
        step += 1
        # slot: loop_end rank=rank
    print("done", rank, flush=True)


if __name__ == "__main__":
    main()
