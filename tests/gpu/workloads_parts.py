"""What the jobs of workloads.py are made of: their clock, models and data sets, small where there is no GPU."""

from __future__ import annotations

import io
import math
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if CUDA else torch.device("cpu")


def pick(on_gpu: Any, on_cpu: Any) -> Any:
    return on_gpu if CUDA else on_cpu


VOCABULARY = pick(16384, 256)
WIDTH = pick(1024, 32)
LENGTH = pick(512, 16)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def start() -> None:
    """What torchrun would have set, if it did not."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**alone, "MASTER_PORT": str(port)}.items():
        os.environ.setdefault(name, value)
    if CUDA:
        torch.cuda.set_device(DEVICE)
    torch.manual_seed(0)


class Clock:
    """Stamps the steps, and measures those after the first ``untimed``."""

    def __init__(self, untimed: int, steps: int, seconds: float = 1e9, settle_s: float = 1e9) -> None:
        self.untimed, self.steps, self.seconds, self.settle_s = untimed, steps, seconds, settle_s
        self.every = 1
        """Measure only whole groups of so many steps."""
        self.stamps: list[float] = []
        self.first_timed = 0
        self.began = self.ended = 0.0

    def step(self) -> bool:
        """Call it at the end of each step: whether that was the last."""
        now = time.perf_counter()
        self.stamps.append(now)
        done = len(self.stamps)
        whole = (done - self.first_timed) % self.every == 0
        if not self.first_timed:
            settled = done >= 8 and now - self.stamps[0] > self.settle_s
            if whole and (done >= self.untimed or settled):
                synchronize()
                self.first_timed, self.began = done, time.perf_counter()
            return False
        if whole and (done >= self.steps or now - self.began > self.seconds):
            synchronize()
            self.ended = time.perf_counter()
            return True
        return False

    def measured(self) -> dict[str, Any]:
        timed = len(self.stamps) - self.first_timed
        step_ms = (self.ended - self.began) / timed * 1e3
        return {"step_ms": round(step_ms, 3), "timed_steps": timed, "untimed_steps": self.first_timed}


def autocast(dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast(DEVICE.type, dtype)


def ddp(network: nn.Module, **more: Any) -> DistributedDataParallel:
    return DistributedDataParallel(network.to(DEVICE), device_ids=[DEVICE.index] if CUDA else None, **more)


def batches(data: Dataset, batch: int, workers: int = 4, **more: Any) -> DataLoader:
    more = {"pin_memory": CUDA, "drop_last": True, **more}
    return DataLoader(data, batch_size=batch, num_workers=workers if CUDA else min(workers, 1), **more)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.projections = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        projected = self.projections(self.before_attention(hidden))
        query, key, value = projected.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.mlp(self.before_mlp(hidden))


class Gpt(nn.Module):
    """Returns the loss."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(pick(1024, 64), WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, pick(16, 2)) for _ in range(layers if CUDA else 2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def new_gpt(layers: int = 8) -> Gpt:
    """Its weights are drawn on the device, which is quicker."""
    with DEVICE:
        return Gpt(layers)


def ddp_gpt(layers: int = 8) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = ddp(new_gpt(layers), gradient_as_bucket_view=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


class DeepMlp(nn.Module):
    """Many small layers."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            hidden = hidden + F.gelu(layer(norm(hidden)))
        return hidden.mean(1)


class PlainGraphLayer(nn.Module):
    """Graph attention with one head, for machines without torch_geometric."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project, self.score = nn.Linear(width, width), nn.Linear(2 * width, 1)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        projected = self.project(nodes)
        sources, ends = projected.index_select(0, edges[0]), projected.index_select(0, edges[1])
        weights = torch.sigmoid(F.leaky_relu(self.score(torch.cat((sources, ends), 1)), 0.2))
        return torch.zeros_like(projected).index_add_(0, edges[1], weights * sources)


def graph_layer(width: int) -> nn.Module:
    try:
        from torch_geometric.nn import GATConv
    except (ImportError, OSError):
        return PlainGraphLayer(width)
    return GATConv(width, width // 4, heads=4, add_self_loops=False)


class GraphNetwork(nn.Module):
    def __init__(self, layers: int, width: int = 64) -> None:
        super().__init__()
        self.encode = nn.Linear(16, width)
        self.layers = nn.ModuleList(graph_layer(width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, features: torch.Tensor, edges: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        nodes = self.encode(features)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            nodes = nodes + F.elu(layer(norm(nodes), edges))
        scores = self.head(nodes).squeeze(1)
        return torch.zeros(GRAPHS, device=scores.device).index_add_(0, owners, scores)


def generator(channels: int) -> nn.Sequential:
    """Images of 64 by 64 from noise, as in DCGAN."""
    layers: list[nn.Module] = [
        nn.ConvTranspose2d(128, channels * 8, 4),
        nn.BatchNorm2d(channels * 8),
        nn.ReLU(),
    ]
    for factor in (8, 4, 2):
        wide, narrow = channels * factor, channels * factor // 2
        layers += [nn.ConvTranspose2d(wide, narrow, 4, 2, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(channels, 3, 4, 2, 1), nn.Tanh())


def discriminator(channels: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 4, 2, 1), nn.LeakyReLU(0.2)]
    for factor in (1, 2, 4):
        narrow, wide = channels * factor, channels * factor * 2
        layers += [nn.Conv2d(narrow, wide, 4, 2, 1, bias=False), nn.BatchNorm2d(wide), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(channels * 8, 1, 4), nn.Flatten(0))


@cache
def corpus() -> torch.Tensor:
    return torch.randint(VOCABULARY, (1 << 20,), generator=torch.Generator().manual_seed(0))


class Tokens(Dataset):
    """Pieces of a corpus, all of one length, or each batch of the next of ``lengths``."""

    def __init__(self, lengths: tuple[int, ...] = (), batch: int = 1) -> None:
        self.corpus, self.lengths, self.batch = corpus(), lengths or (LENGTH,), batch

    def __len__(self) -> int:
        return 1 << 17

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = self.lengths[index // self.batch % len(self.lengths)]
        start = index * 977 % (len(self.corpus) - length - 1)
        piece = self.corpus[start : start + length + 1]
        return piece[:-1], piece[1:]


class Texts(Dataset):
    """Splits a text into words and these into pieces, in Python, for each sample: some 2 ms."""

    def __init__(self) -> None:
        letters = random.Random(0)
        words = ["".join(letters.choices("etaoinshrdlu", k=letters.randint(2, 9))) for _ in range(2000)]
        self.texts = [" ".join(letters.choices(words, k=pick(300, 20))) for _ in range(256)]
        self.pieces = {word[:size]: len(word) for word in words for size in (1, 2, 3, 4)}

    def __len__(self) -> int:
        return 1 << 17

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        identifiers = self.tokenize(self.texts[index % len(self.texts)])[: LENGTH + 1]
        identifiers += [0] * (LENGTH + 1 - len(identifiers))
        tokens = torch.tensor(identifiers)
        return tokens[:-1], tokens[1:]

    def tokenize(self, text: str) -> list[int]:
        """Always the longest known piece, as WordPiece does."""
        identifiers = []
        for word in text.lower().split():
            start = 0
            while start < len(word):
                end = min(len(word), start + 6)
                while end > start + 1 and word[start:end] not in self.pieces:
                    end -= 1
                piece = word[start:end]
                identifiers.append(
                    sum(ord(letter) * 31**place for place, letter in enumerate(piece)) % VOCABULARY
                )
                start = end
        return identifiers


@cache
def jpegs() -> list[bytes]:
    """Smooth images of 640 by 480 with a little noise, as files."""
    from PIL import Image

    drawn = np.random.default_rng(0)
    noise = drawn.normal(0, 6, (480, 640, 3)).astype(np.float32)
    files = []
    for number in range(pick(64, 4)):
        coarse = Image.fromarray(drawn.integers(0, 256, (15, 20, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((640, 480), Image.Resampling.BICUBIC), dtype=np.float32)
        image = np.clip(smooth + np.roll(noise, number * 31, axis=1), 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=85)
        files.append(file.getvalue())
    return files


class Photographs(Dataset):
    """JPEG files, decoded, cropped, flipped and made a tensor, as for ImageNet."""

    def __init__(self) -> None:
        from torchvision import transforms

        self.files = jpegs()
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(pick(224, 32)),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        )

    def __len__(self) -> int:
        return 1 << 17

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        image = Image.open(io.BytesIO(self.files[index % len(self.files)])).convert("RGB")
        return self.transform(image), index % 1000


class Arrays(Dataset):
    """Images that are in memory already, as bytes or as 32-bit floats."""

    def __init__(self, side: int, dtype: torch.dtype = torch.float32, count: int = 512) -> None:
        shape = (count if CUDA else 8, 3, side, side)
        self.images = torch.randint(256, shape, dtype=torch.uint8).to(dtype)

    def __len__(self) -> int:
        return 1 << 17

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index % len(self.images)], index % 1000


GRAPHS, NODES, NEIGHBOURS = pick(32, 2), 48, 6


class Molecules(Dataset):
    """Small graphs of one size."""

    def __len__(self) -> int:
        return 1 << 17

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        drawn = torch.Generator().manual_seed(index)
        sources = torch.arange(NODES).repeat_interleave(NEIGHBOURS)
        ends = torch.randint(NODES, (NODES * NEIGHBOURS,), generator=drawn)
        return torch.randn(NODES, 16, generator=drawn), torch.stack((sources, ends)), index % 7 / 7


def collate_graphs(graphs: list[tuple[torch.Tensor, torch.Tensor, float]]) -> tuple[torch.Tensor, ...]:
    """One large graph of all: features, edges, the graph of each node, and what to predict."""
    features, edges, labels = zip(*graphs, strict=True)
    moved = torch.cat([edge + number * NODES for number, edge in enumerate(edges)], 1)
    owners = torch.arange(len(graphs)).repeat_interleave(NODES)
    return torch.cat(features), moved, owners, torch.tensor(labels)


class Metrics:
    """Histories, moving averages and token counts, all in Python."""

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []
        self.seen: dict[int, int] = {}

    def update(self, step: int, values: dict[str, float], tokens: torch.Tensor) -> dict[str, float]:
        counts: dict[int, int] = {}
        for token in tokens.flatten().tolist():
            counts[token] = counts.get(token, 0) + 1
            self.seen[token] = self.seen.get(token, 0) + 1
        self.history.append({"step": step, "time": time.time(), **values})
        recent = self.history[-40:]
        report = {"coverage": len(self.seen) / VOCABULARY}
        for name in values:
            series = [row[name] for row in recent]
            report[f"{name}/mean"] = mean = sum(series) / len(series)
            report[f"{name}/std"] = math.sqrt(sum((value - mean) ** 2 for value in series) / len(series))
            for decay in (0.5, 0.8, 0.9, 0.95, 0.98, 0.99):
                average = series[0]
                for value in series:
                    average = decay * average + (1 - decay) * value
                report[f"{name}/ema{decay}"] = average
        shares = [count / tokens.numel() for count in counts.values()]
        report["entropy"] = -sum(share * math.log(share) for share in shares)
        return report


class Prefetcher:
    """Copies the next batch on a stream of its own, as in apex's ImageNet example."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream() if CUDA else None
        self.preload()

    def preload(self) -> None:
        images, labels = next(self.loader)
        with torch.cuda.stream(self.stream) if CUDA else nullcontext():
            self.labels = labels.to(DEVICE, non_blocking=True)
            self.images = images.to(DEVICE, non_blocking=True).float().div_(127.5).sub_(1)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            if CUDA:
                torch.cuda.current_stream().wait_stream(self.stream)
                self.images.record_stream(torch.cuda.current_stream())
                self.labels.record_stream(torch.cuda.current_stream())
            images, labels = self.images, self.labels
            self.preload()
            yield images, labels


RISING = tuple(range(184, 1025, 56)) if CUDA else tuple(range(4, 20, 4))
"""Lengths of the batches of one bucket of sentences: short ones first."""


def leave_little_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """No more than the longest batch needs, and a third of that; with a fifth, an allocation failed on an H200."""
    tokens = torch.zeros(16, RISING[-1], dtype=torch.long, device=DEVICE)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with autocast():
        loss = model(tokens, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    needed = torch.cuda.max_memory_reserved() * 1.35
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, needed / whole), DEVICE)
