"""A DDP job with work outside the phases of its training steps, at a place that is named on the command line.

    torchrun --nproc-per-node 2 gap_work.py --place after-optimizer --kind products --ms 12 --on 0

``--on -1`` is all ranks. Prints the median step of rank 0 in ms, so that the same job with ``--ms 0`` is the measured truth.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

PLACES = (
    "after-optimizer",
    "before-forward",
    "before-backward",
    "before-optimizer",
    "in-forward",
    "second-model",
)
WIDTH, BATCH = 320, 96


def products(seconds: float, sink: list[float]) -> None:
    """Matrix products: operators, as of a teacher."""
    until, matrix = time.perf_counter() + seconds, torch.ones(160, 160)
    with torch.no_grad():
        while time.perf_counter() < until:
            matrix = torch.tanh(matrix @ matrix)
    sink.append(float(matrix[0, 0]))


def histograms(seconds: float, sink: list[float]) -> None:
    """A metric."""
    until, values = time.perf_counter() + seconds, torch.linspace(0, 1, 60_000)
    while time.perf_counter() < until:
        counts = torch.histc(values, 64)
        sink.append(float(counts.argmax()))


def python(seconds: float, sink: list[float]) -> None:
    """Words and numbers, no operator."""
    until, total = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        for number in range(200):
            total += number * number % 7
    sink.append(float(total))


def mixed(seconds: float, sink: list[float]) -> None:
    """What a logger does: half operators, half Python."""
    products(seconds / 2, sink)
    python(seconds / 2, sink)


def sleeping(seconds: float, sink: list[float]) -> None:
    """Nothing at all."""
    time.sleep(seconds)


KINDS = {
    "products": products,
    "histograms": histograms,
    "python": python,
    "mixed": mixed,
    "sleeping": sleeping,
}


class Extra:
    """The work that is planted."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.options, self.sink, self.step = options, [0.0], 0
        self.on = options.ms > 0 and options.on in (-1, rank)

    def at(self, place: str) -> None:
        """Do it, if this is its place and turn."""
        if self.on and place == self.options.place and self.step % self.options.every == 0:
            KINDS[self.options.kind](self.options.ms / 1000, self.sink)


class Model(nn.Module):
    """What DDP wraps: the network, and what the job does in its forward besides."""

    def __init__(self, extra: Extra) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(5):
            parts += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        self.network, self.extra = nn.Sequential(*parts, nn.Linear(WIDTH, 1)), extra

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.extra.at("in-forward")
        result: torch.Tensor = self.network(data)
        return result


def critic_step(
    critic: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor, extra: Extra
) -> None:
    """A second model that is trained, on each rank by itself."""
    loss = critic(data).pow(2).mean()
    extra.at("second-model")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", choices=PLACES, default=PLACES[0])
    parser.add_argument("--kind", choices=tuple(KINDS), default="products")
    parser.add_argument("--ms", type=float, default=12.0)
    parser.add_argument("--on", type=int, default=0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    extra = Extra(options, rank)
    model = DistributedDataParallel(Model(extra))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=1e-3)
    dataset = TensorDataset(torch.randn(BATCH * 8, WIDTH), torch.randn(BATCH * 8, 1))
    loader = DataLoader(
        dataset, batch_size=None, sampler=[list(range(i, i + BATCH)) for i in range(0, BATCH * 8, BATCH)]
    )
    times, began = [], time.perf_counter()
    while extra.step < options.steps:
        for data, target in loader:
            if options.place == "second-model":
                critic_step(critic, critic_optimizer, data, extra)
            extra.at("before-forward")
            loss = nn.functional.mse_loss(model(data), target)
            extra.at("before-backward")
            loss.backward()
            extra.at("before-optimizer")
            optimizer.step()
            extra.at("after-optimizer")
            optimizer.zero_grad()
            extra.step += 1
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
            if extra.step >= options.steps:
                break
    if rank == 0:
        print(
            f"median {1000 * statistics.median(times[10:]):.2f} ms, mean {1000 * statistics.mean(times[10:]):.2f} ms",
            flush=True,
        )
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
