"""A job of one rank whose loaders a framework replaces by its own, as accelerate's ``prepare`` and Lightning's ``fit`` do.

python prepared_loaders.py FOLDER: the framework is a package installed in there.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FRAMEWORK = """
from torch.utils.data import DataLoader

class Prepared(DataLoader):
    def __init__(self, dataset, *more, **settings):
        super().__init__(dataset, *more, **settings)

def prepare(loader):
    return Prepared(loader.dataset, batch_size=loader.batch_size)
"""

packages = os.path.join(sys.argv[1], "site-packages")
os.makedirs(packages)
with open(os.path.join(packages, "framework.py"), "w") as file:
    file.write(FRAMEWORK)
sys.path.append(packages)
from framework import Prepared, prepare  # noqa: E402

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data, other = (TensorDataset(torch.ones(32, 4)) for _ in range(2))
loader = DataLoader(data, batch_size=2)  # line of 2
again = prepare(prepare(loader))
own = Prepared(other, batch_size=4)  # line of 4
one, two = (
    DataLoader(other, batch_size=8),
    DataLoader(other, batch_size=16),
)
unclear = prepare(one)  # line of 8
for loader in (again, own, unclear):
    for (batch,) in loader:
        model(batch).sum().backward()
        optimizer.step()
