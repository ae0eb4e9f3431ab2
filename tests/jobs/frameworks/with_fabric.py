"""``fabric run --accelerator cpu --strategy ddp --devices 2 with_fabric.py``: eight steps a rank."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from torch import nn


def main() -> None:
    fabric = Fabric()
    model = nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(8):
        optimizer.zero_grad()
        fabric.backward(model(torch.randn(4, 4)).square().mean())
        optimizer.step()
    fabric.print(f"took 8 steps on {fabric.world_size} ranks", flush=True)


if __name__ == "__main__":
    main()
