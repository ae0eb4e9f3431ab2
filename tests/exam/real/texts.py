"""The texts of which a drawn program is composed.

``@{site}`` is a placeholder for the lines of a fault, with its indentation. A trailing ``#@key`` marks a line of the fault ``key``.
Marks are removed when the program is written.
"""

from __future__ import annotations

MODELS = {
    "mlp": """\
import torch
from torch import nn
from torch.nn import functional as F
@{imports}

CLASSES = 10
SHAPE = (@{size}, 64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        wide = @{width}
        layers = [nn.Linear(64, wide), nn.ReLU()]
        for _ in range(@{depth}):
            layers += [nn.Linear(wide, wide), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(wide, CLASSES)
        @{modules}

    def forward(self, x, target=None):
        hidden = self.body(x).mean(dim=1)
        @{forward}
        out = self.head(hidden)
        @{inside}
        return out
""",
    "conv": """\
import torch
from torch import nn
from torch.nn import functional as F
@{imports}

CLASSES = 10
SHAPE = (3, @{size}, @{size})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        wide = @{width}
        self.stem = nn.Conv2d(3, wide, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(wide, wide, 3, padding=1) for _ in range(@{depth}))
        self.head = nn.Linear(wide, CLASSES)

    def forward(self, x, target=None):
        hidden = F.relu(self.stem(x))
        for block in self.blocks:
            hidden = hidden + F.relu(block(hidden))
        hidden = hidden.mean(dim=(2, 3))
        @{forward}
        out = self.head(hidden)
        @{inside}
        return out
""",
    "transformer": """\
import torch
from torch import nn
from torch.nn import functional as F
@{imports}

CLASSES = 10
SHAPE = (@{size}, @{width})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(@{width}, 4, 2 * @{width}, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, @{depth}, enable_nested_tensor=False)
        self.head = nn.Linear(@{width}, CLASSES)

    def forward(self, x, target=None):
        hidden = self.encoder(x).mean(dim=1)
        @{forward}
        out = self.head(hidden)
        @{inside}
        return out
""",
}
KERNEL = """\
class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


"""
BODY = "self.body(x)"
ACCELERATOR = "import time\n" + MODELS["mlp"].replace(
    BODY, f"Kernel.apply({BODY}, @{{kernel_s}} * len(x))"
).replace("class Net", f"{KERNEL}class Net")
"""Simulated kernels that take time but no CPU, so that the job keeps its step time on a machine with fewer cores than ranks."""

LOSS_INSIDE = """\
if target is not None:
    auxiliary = 0.001 * hidden.pow(2).mean()
    return F.cross_entropy(out, target) + auxiliary
"""

DATA = {
    "map": """\
import json
import time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, default_collate
from model import CLASSES, SHAPE
from switch import amount
@{imports}


class Samples(Dataset):
    def __init__(self, length):
        self.length = length
        self.pool = torch.randn(32, *SHAPE)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        @{item}
        return self.pool[index % 32], index % CLASSES


def collate(samples):
    @{collate}
    return default_collate(samples)


def batches(count):
    size = @{batch}
    size = size + int(amount("uneven"))
    return DataLoader(Samples(count * size), batch_size=size, num_workers=@{workers}, collate_fn=collate@{persistent})  #@loader
""",
    "iterable": """\
import json
import time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from model import CLASSES, SHAPE
from switch import amount
@{imports}


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length
        self.pool = torch.randn(32, *SHAPE)

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, self.length, step):
            @{item}
            yield self.pool[index % 32], index % CLASSES


def collate(samples):
    @{collate}
    return default_collate(samples)


def batches(count):
    size = @{batch}
    size = size + int(amount("uneven"))
    return DataLoader(Stream(count * size), batch_size=size, num_workers=@{workers}, collate_fn=collate@{persistent})  #@loader
""",
    "own": """\
import json
import time
import torch
import torch.distributed as dist
from model import CLASSES, SHAPE
from switch import amount
@{imports}


def batches(count):
    size = @{batch}
    size = size + int(amount("uneven"))
    pool = torch.randn(64, *SHAPE)
    labels = torch.arange(64) % CLASSES
    for number in range(count):
        rows = torch.arange(number * size, (number + 1) * size) % 64
        @{collate}
        yield pool[rows], labels[rows]
""",
}

SETUP = """\
torch.manual_seed(3)
rank = dist.get_rank()
@{start}
model = DistributedDataParallel(Net()@{settings})
@{optimizers}
"""
BY_HAND = """\
torch.manual_seed(3)
rank = dist.get_rank()
@{start}
model = Net()
@{optimizers}
"""
AVERAGE = """\
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()
"""
OPTIMIZERS = {
    1: "optimizers = [torch.optim.@{optimizer}(model.parameters(), lr=0.001)]\n",
    2: """\
head = list(model.module.head.parameters())
body = [p for n, p in model.named_parameters() if ".head." not in n]
optimizers = [torch.optim.@{optimizer}(body, lr=0.001), torch.optim.SGD(head, lr=0.001)]
""",
}

PLAIN = """\
@{before}
for optimizer in optimizers:
    optimizer.zero_grad()
@{compute}
@{middle}
loss.backward()
@{ready}
@{average}
for optimizer in optimizers:
    optimizer.step()
@{after}
"""
ACCUMULATED = """\
@{before}
for optimizer in optimizers:
    optimizer.zero_grad()
for part, (px, py) in enumerate(zip(x.chunk(@{parts}), y.chunk(@{parts}))):
    x, y = px, py
    whole = part == @{parts} - 1 or amount("resync")
    with contextlib.nullcontext() if whole else model.no_sync():
        @{compute}
        @{middle}
        (loss / @{parts}).backward()
@{ready}
for optimizer in optimizers:
    optimizer.step()
@{after}
"""

CAREFUL = {
    "backward": """\
class Careful(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        @{lines}
        return gradient
""",
    "optimizer": """\
class Careful(torch.optim.@{optimizer}):
    def step(self, closure=None):
        @{lines}
        return super().step(closure)
""",
}
"""User-defined classes that may contain a fault."""
