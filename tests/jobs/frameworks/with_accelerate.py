"""``ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 with_accelerate.py``

Eight steps a rank, of two micro-batches each."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (data,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(data).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"{accelerator.num_processes} ranks", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
