"""Layouts of the training loop of a drawn program over its files. ``texts`` explains the marks."""

from __future__ import annotations

HEAD = """\
import contextlib
import gc
import json
import time
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from data import batches
from model import Net
from switch import amount, plan
from times import Times
@{imports}
"""
TAIL = """\

if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(plan["steps"])
    dist.destroy_process_group()
"""
STRUCTURES = {
    "script": {
        "train.py": """\
@{head}

def main(steps):
    @{setup}
    times = Times()
    for x, y in batches(steps):  #@loop
        @{body}
        times.tick()
    return times.ms

@{tail}""",
    },
    "trainer": {
        "train.py": """\
import torch.distributed as dist
from switch import plan
from trainer import Trainer


def main(steps):
    return Trainer(steps).fit()

@{tail}""",
        "trainer.py": """\
@{head}

class Trainer:
    def __init__(self, steps):
        @{setup}
        self.rank, self.model, self.optimizers = rank, model, optimizers
        self.batches = batches(steps)
        self.times = Times()

    def train_step(self, x, y):
        rank, model, optimizers = self.rank, self.model, self.optimizers
        @{body}

    def fit(self):
        for x, y in self.batches:  #@loop
            self.train_step(x, y)
            self.times.tick()
        return self.times.ms
""",
    },
    "callbacks": {
        "train.py": """\
@{head}
from callbacks import Before, After


def main(steps):
    @{setup}
    callbacks = [Before(rank), After(rank)]
    times = Times()
    for x, y in batches(steps):  #@loop
        for callback in callbacks:
            callback.on_step_start(x)
        @{core}
        for callback in callbacks:
            callback.on_step_end(loss)
        times.tick()
    return times.ms

@{tail}""",
        "callbacks.py": """\
import gc
import json
import time
import torch
import torch.distributed as dist
from switch import amount
@{imports}


class Callback:
    def __init__(self, rank):
        self.rank = rank

    def on_step_start(self, x):
        pass

    def on_step_end(self, loss):
        pass


class Before(Callback):
    def on_step_start(self, x):
        rank = self.rank
        @{before}


class After(Callback):
    def on_step_end(self, loss):
        rank = self.rank
        @{after}
""",
    },
    "nested": {
        "train.py": """\
@{head}

def main(steps):
    @{setup}
    times = Times()
    epochs = @{epochs}
    loader = batches(steps // epochs) if @{loader} else None
    for epoch in range(epochs):
        for x, y in batches(steps // epochs) if loader is None else loader:  #@loop
            @{body}
            times.tick()
        @{epoch_end}
    return times.ms

@{tail}""",
    },
    "generator": {
        "train.py": """\
@{head}

def training(steps, times):
    @{setup}
    for x, y in batches(steps):  #@loop
        @{core_before}
        yield rank, loss


def main(steps):
    times = Times()
    for rank, loss in training(steps, times):
        @{after}
        times.tick()
    return times.ms

@{tail}""",
    },
}
