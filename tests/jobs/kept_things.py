"""A job of one rank that keeps all it has built: DDP modules and loaders prepared by a framework, and optimizers.

python kept_things.py FOLDER COUNT: the framework is a package installed in there. Prints how many bytecode operations of the hook
the eight last of the first 300 took, each built and trained for a step, and the eight last of COUNT.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FRAMEWORK = """
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

def prepare(model, loader):
    return DistributedDataParallel(model), DataLoader(loader.dataset, batch_size=loader.batch_size)
"""
FEW, MEASURED = 300, 8

packages = os.path.join(sys.argv[1], "site-packages")
os.makedirs(packages)
with open(os.path.join(packages, "framework.py"), "w") as file:
    file.write(FRAMEWORK)
sys.path.append(packages)
from framework import prepare  # noqa: E402

operations = 0


def traced(frame, event, argument):
    """Count what the hook's own frames execute."""
    global operations
    if f"{os.sep}hook{os.sep}" not in frame.f_code.co_filename:
        return None
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    operations += event == "opcode"
    return traced


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
count = int(sys.argv[2])
data = TensorDataset(torch.ones(2, 4))
kept = []
for number in range(count):
    ends = [end for end in (FEW, count) if end - MEASURED <= number < end]
    if ends and sys.gettrace() is None:
        operations = 0
        sys.settrace(traced)
    model, loader = prepare(nn.Linear(4, 1), DataLoader(data, batch_size=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept.append((model, loader, optimizer))
    for (batch,) in loader:
        model(batch).sum().backward()
        optimizer.step()
    if number + 1 in ends:
        sys.settrace(None)
        print(operations)
