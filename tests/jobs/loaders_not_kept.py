"""A job of one rank that keeps only the iterators of its DataLoaders."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(64, 4))
batches = iter(DataLoader(data, batch_size=8, pin_memory=False))
for step in range(8):
    (batch,) = next(batches)
    model(batch).sum().backward()
    optimizer.step()
    if step < 2:
        for _ in DataLoader(data, batch_size=32, num_workers=1):
            pass
