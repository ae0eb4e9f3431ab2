"""Train a small image classifier with DistributedDataParallel on CPUs.

torchrun --standalone --nproc-per-node 2 job.py --fault slow-data

This is an ordinary training script except for ``--fault``, which selects one of the usual mistakes that make such jobs slow.
The script uses no profiler.
"""

import argparse
import gc
import tempfile
import threading
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH_SIZE = 8
CLASSES = 10
Batch = tuple[torch.Tensor, torch.Tensor]


class Images(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Small random images with labels, the same on every rank."""

    def __init__(self, length: int, fault: str, rank: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(256, 3, 32, 32, generator=generator)
        self.labels = torch.randint(CLASSES, (256,), generator=generator)
        self.length, self.fault, self.rank = length, fault, rank
        self.packed = zlib.compress(bytes(range(256)) * 4096, 1)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fault == "slow-data":
            self.decode()
        elif self.fault == "slow-data-one-rank" and self.rank == 1:
            self.read_from_slow_storage()
        return self.images[index % 256], self.labels[index % 256]

    def decode(self) -> None:
        """Decompress an image that is far larger than the part that training uses."""
        for _ in range(4):
            zlib.decompress(self.packed)

    def read_from_slow_storage(self) -> None:
        """Read a file of this rank, whose files are on another file system."""
        time.sleep(0.005)


class Classifier(nn.Module):
    """A few convolutions: much computation, few parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()),
            *(
                nn.MaxPool2d(2),
                nn.Conv2d(32, 64, 3, padding=1),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(4),
                nn.Flatten(),
            ),
        )
        self.head = nn.Linear(64 * 16, CLASSES)

    def forward(self, images: torch.Tensor, extra_passes: int = 0) -> torch.Tensor:
        features = self.trunk(images)
        for _ in range(extra_passes):
            features = 0.5 * (features + self.trunk(images))
        logits: torch.Tensor = self.head(features)
        return logits


class DeepAndThin(nn.Module):
    """Many small parameters."""

    def __init__(self, depth: int = 120, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Linear(3 * 32 * 32, width)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.stem(images.flatten(1))))
        return logits


class Wide(nn.Module):
    """Many parameters, little computation per parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(3 * 32 * 32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(images.flatten(1))
        return logits


def build_model(fault: str) -> nn.Module:
    """The model under DistributedDataParallel."""
    torch.manual_seed(0)
    if fault == "tiny-buckets":
        return DistributedDataParallel(DeepAndThin(), bucket_cap_mb=0.001)
    if fault == "communication-bound":
        return DistributedDataParallel(Wide(1536))
    if fault == "no-no-sync":
        return DistributedDataParallel(Wide(192))
    return DistributedDataParallel(Classifier())


def log_quantiles(model: nn.Module) -> dict[tuple[str, str], list[float]]:
    """Quantiles of each layer's weights and gradients, for a dashboard."""
    quantiles = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        for kind, values in (("weight", parameter.detach()), ("gradient", parameter.grad)):
            magnitudes = sorted(abs(value) for value in values.flatten().tolist())
            quantiles[name, kind] = [magnitudes[int(p * (len(magnitudes) - 1))] for p in (0.05, 0.5, 0.95)]
    return quantiles


def augment(images: torch.Tensor, rounds: int) -> torch.Tensor:
    """Smooth the images ``rounds`` times."""
    for _ in range(rounds):
        images = nn.functional.avg_pool2d(images, 5, stride=1, padding=2)
    return images


def average_metrics(loss: torch.Tensor, output: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Loss, accuracy and other metrics, averaged over the ranks one by one."""
    correct = (output.argmax(1) == labels).float()
    metrics = [
        loss.detach().clone(),
        correct.mean(),
        correct.var(),
        *(correct[labels == n].sum() for n in range(CLASSES)),
    ]
    for metric in metrics:
        dist.all_reduce(metric)
    return [metric.item() / dist.get_world_size() for metric in metrics]


def train_step(
    step: int, batch: Batch, model: nn.Module, optimizer: Optimizer, loss_function: nn.Module, fault: str
) -> None:
    """One optimizer step on one batch."""
    rank = dist.get_rank()
    images, labels = batch
    extra_passes = 0
    if fault == "barrier":
        # Each batch is expensive either to augment or to classify, and in each step the ranks differ.
        heavy_to_augment = (step + rank) % 2 == 0
        images = augment(images, 24 if heavy_to_augment else 0)
        extra_passes = 0 if heavy_to_augment else 1
        dist.barrier()
    elif fault == "slow-compute-one-rank":
        extra_passes = 2 if rank == 1 else 0
    elif fault == "intermittent" and rank == 1 and step % 10 == 9:
        extra_passes = 5
    output = model(images, extra_passes) if extra_passes else model(images)
    loss = loss_function(output, labels)
    loss.backward()
    if fault == "metrics-allreduce":
        average_metrics(loss, output, labels)
    elif fault == "rank0-host-work" and rank == 0:
        log_quantiles(model)
    optimizer.step()
    optimizer.zero_grad()


def train_accumulated_step(
    batches: list[Batch], model: nn.Module, optimizer: Optimizer, loss_function: nn.Module
) -> None:
    """One optimizer step on several batches."""
    for images, labels in batches:
        loss = loss_function(model(images), labels) / len(batches)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def save_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: Optimizer) -> None:
    """Save the model, the optimizer and the history on one rank, while the others wait."""
    history = torch.zeros(2048, 3, 32, 32)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "history": history,
    }
    torch.save(state, folder / "checkpoint.pt")


counting = threading.Lock()


def count_batch() -> None:
    """Count a batch under a lock, and report it under the same lock."""
    with counting:
        tell_count()


def tell_count() -> None:
    """Wait for the lock, which the caller holds already."""
    with counting:
        print("counted", flush=True)


def train(fault: str, steps: int, folder: Path) -> None:
    """Train on this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches_per_step = 8 if fault == "no-no-sync" else 1
    batch_size = BATCH_SIZE * 2 if fault == "uneven-batch" and rank == 1 else BATCH_SIZE
    dataset = Images(2 * BATCH_SIZE * world_size * steps * batches_per_step, fault, rank)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset), num_workers=0)
    model = build_model(fault)
    optimizer = SGD(model.parameters(), lr=0.01)
    loss_function = nn.CrossEntropyLoss()
    batches = iter(loader)
    for step in range(steps):
        if fault == "no-no-sync":
            train_accumulated_step([next(batches) for _ in range(8)], model, optimizer, loss_function)
        else:
            train_step(step, next(batches), model, optimizer, loss_function, fault)
        if fault == "checkpoint" and rank == 0 and step % 5 == 4:
            save_checkpoint(folder, step, model, optimizer)
        if fault == "hang" and rank == 1 and step == 60:
            count_batch()
        if fault == "gc" and rank == 1 and step % 2 == 1:
            gc.collect()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1} of {steps}", flush=True)


def main() -> None:
    """Read the options, join the process group, train."""
    parser = argparse.ArgumentParser(description="Train a small image classifier.")
    parser.add_argument("--fault", default="healthy")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        train(options.fault, options.steps, Path(folder))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
