"""A DDP job that does what ddpdoctor must leave alone: a communication hook and a DDP subclass of its own, children of
several kinds that train a little themselves, copies and pickles. Prints what a test compares.

torchrun --nproc-per-node 2 own_ways.py FOLDER
"""

from __future__ import annotations

import copy
import hashlib
import io
import multiprocessing
import os
import pickle
import subprocess
import sys

import torch
import torch.distributed as dist
from tiny_ddp import end_in_order
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

HERE = os.path.dirname(os.path.abspath(__file__))


class Timed(DistributedDataParallel):
    """Counts its forwards."""

    forwards = 0

    def forward(self, *inputs, **options):
        self.forwards += 1
        return super().forward(*inputs, **options)


class Odd(Dataset):
    """Of no known length, and with items that no pickle takes."""

    def __len__(self) -> int:
        raise TypeError("nobody knows")

    def __getitem__(self, index: int) -> dict:
        return {"name": lambda: index, "data": torch.full((4,), index / 8)}


class Odder(dict):
    @property
    def shape(self):
        raise RuntimeError("this batch has no shape")


def collate(items: list[dict]) -> Odder:
    return Odder(data=torch.stack([item["data"] for item in items]))


def train_alone(_: int = 0) -> float:
    """What a child does: it steps an optimizer, but is no rank."""
    torch.manual_seed(0)
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        layer(torch.ones(2)).sum().backward()
        optimizer.step()
    return float(layer.weight.sum())


def children() -> list[str]:
    """The result of the same training in children of every kind."""
    found = [f"{train_alone():.6f}"]
    all_kinds = "--all-kinds" in sys.argv  # others than forks import torch anew
    for method in ("fork", "spawn", "forkserver") if all_kinds else ("fork",):
        with multiprocessing.get_context(method).Pool(1) as pool:
            found.append(f"{pool.map(train_alone, [0])[0]:.6f}")
    if all_kinds:
        code = f"import sys; sys.path.insert(0, {HERE!r}); import own_ways; print(f'{{own_ways.train_alone():.6f}}')"
        command = [sys.executable, "-c", code]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    if (child := os.fork()) == 0:
        os._exit(int(f"{train_alone():.6f}" != found[0]))
    found.append(f"forked {os.waitpid(child, 0)[1]}")
    return found


def own_hook(state, bucket):
    state.append(bucket.buffer().numel())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Timed(nn.Linear(4, 2))
    reduced: list[int] = []
    model.register_comm_hook(reduced, own_hook)
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(Odd(), batch_sampler=[[0, 1], [2, 3], [4], [5, 6], [7]], collate_fn=collate)
    for batch in loader:
        model(batch["data"]).square().sum().backward()
        optimizer.step()
    said = [f"forwards {model.forwards} reduced {reduced}"]
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [copy.deepcopy(model.module), pickle.loads(pickle.dumps(model)).module]
    copies.append(torch.load(saved, weights_only=False).module)
    texts = [each.weight.detach().numpy().tobytes() for each in [model.module, *copies]]
    said.append(f"{len(set(texts))} {hashlib.sha256(texts[0]).hexdigest()}")
    states = pickle.loads(pickle.dumps([optimizer.state_dict(), copy.deepcopy(optimizer).state_dict()]))
    averages = {str(state["state"][0]["exp_avg"].tolist()) for state in states}
    said.append(f"{averages} {children() if dist.get_rank() == 0 else []}")
    # In one piece: the ranks share their output.
    os.write(1, "".join(f"rank {dist.get_rank()}: {line}\n" for line in said).encode())
    end_in_order()


if __name__ == "__main__":
    main()
