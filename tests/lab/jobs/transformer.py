"""A small language model: a Trainer class, AdamW, clipped gradients, a schedule, an endless stream of text."""

import argparse
import dataclasses
import time  # noqa: F401

import torch
import torch.distributed as dist
from accelerator import kernel
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

# slot: top


@dataclasses.dataclass
class Config:
    steps: int = 100
    step_ms: float = 20.0
    batch: int = 8
    context: int = 16
    vocabulary: int = 50
    width: int = 32


class TextStream(IterableDataset):
    def __init__(self, config, rank):
        self.config, self.rank = config, rank

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.rank)
        while True:
            tokens = torch.randint(self.config.vocabulary, (self.config.context + 1,), generator=generator)
            # slot: dataset rank=self.rank
            yield tokens[:-1], tokens[1:]


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = nn.MultiheadAttention(config.width, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(2))
        self.head = nn.Linear(config.width, config.vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = kernel(block(x), self.config.step_ms / 2, self.config.batch)
        # slot: forward rank=dist.get_rank() var=x
        return self.head(x)


class Trainer:
    def __init__(self, config):
        self.config = config
        self.rank = dist.get_rank()
        self.model = DistributedDataParallel(Transformer(config))  # the model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: min(1.0, (s + 1) / 10))
        stream = TextStream(config, self.rank)
        self.loader = DataLoader(stream, batch_size=config.batch, num_workers=1)  # the loader

    def fit(self):
        batches = iter(self.loader)
        for step in range(self.config.steps):
            self.train_step(step, *next(batches))  # the loader

    def train_step(self, step, tokens, targets):
        logits = self.model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        # slot: between rank=self.rank
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        # slot: after_backward rank=self.rank
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        if step % 25 == 24:
            self.report(step, loss.detach())
        # slot: loop_end rank=self.rank

    def report(self, step, loss):
        dist.all_reduce(loss)
        if self.rank == 0:
            print(f"step {step}: {loss.item() / dist.get_world_size():.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(Config):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default
        )
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    Trainer(Config(**vars(parser.parse_args()))).fit()
    dist.barrier()
    dist.destroy_process_group()
