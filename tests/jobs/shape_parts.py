"""What loops of many shapes have in common: see ``loop_shapes.py``."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ROUNDS = 60 if "--thin" in sys.argv else 7
LATER = ROUNDS * 3 // 7
"""In the midst of a block of steps of which only the times are kept, where there are such."""
SHAPES: dict[str, Callable[[], int]] = {}


def shape(function: Callable[[], int]) -> Callable[[], int]:
    SHAPES[function.__name__] = function
    return function


def net() -> DDP:
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(2, 4)).square().mean()
