"""Errors and warnings of the job's own, in and through what ddpdoctor wraps: a job of one rank whose stderr a test
compares.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Fragile(nn.Linear):
    def forward(self, data: torch.Tensor) -> torch.Tensor:
        warnings.warn("from a forward", stacklevel=2)
        if data.sum() > 100:
            raise ValueError("too large")
        return super().forward(data)


class Broken(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        raise KeyError(index)


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        raise ArithmeticError("no gradient")


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(Fragile(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    trials: list[Callable[[], object]] = [
        lambda: model(torch.full((2,), 200.0)),
        lambda: next(iter(DataLoader(Broken()))),
        lambda: next(iter(DataLoader(Broken(), num_workers=1))),
        lambda: torch.load("no-such-file"),
        lambda: torch.save(lambda: 0, os.devnull),
        lambda: dist.all_reduce("no tensor"),
        lambda: dist.send(torch.ones(1), 0),
        lambda: Refusing.apply(torch.ones(1, requires_grad=True)).backward(),
        lambda: torch.ones(2, requires_grad=True).backward(),
        lambda: optimizer.step(lambda: 1 / 0),
        lambda: dist.all_gather_into_tensor(torch.empty(1), torch.ones(1)),
        lambda: torch.ones(1, requires_grad=True).sum().backward(create_graph=True),
        lambda: dist.destroy_process_group("no group"),
    ]
    for number, trial in enumerate(trials):
        try:
            trial()
        except Exception:
            print(f"trial {number}", file=sys.stderr)
            traceback.print_exc()
    torch.load("no-such-file-either")


if __name__ == "__main__":
    main()
