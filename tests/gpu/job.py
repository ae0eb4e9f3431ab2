"""A DDP job on one GPU, with one planted fault. It measures its own steps, so that what is said about it can be checked.

    torchrun --nproc-per-node N job.py [--fault NAME] [--backend nccl] [--steps N] [--truth FILE]

NCCL refuses two ranks on one GPU, unless it takes them for ranks of two hosts: each rank has an ``NCCL_HOSTID`` of its own, and
the ranks talk through sockets.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from contextlib import nullcontext
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

UNTIMED = 80
"""Steps that the job's own measure leaves out: warm-up and the profiler window."""
RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
CHANNELS, SIDE = 64, 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="")
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--loop-ms", type=float, default=5.0)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument(
        "--profile", default="", help="folder for traces of torch.profiler, opened by the job itself"
    )
    parser.add_argument("--truth", default="")
    return parser.parse_args()


OPTIONS = arguments()
FAULT = OPTIONS.fault
CUDA = torch.cuda.is_available()
"""Without a GPU the job only shows that it has no error: --backend gloo --batch 2."""
DEVICE = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if CUDA
    else torch.device("cpu")
)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


class Images(Dataset):
    def __len__(self) -> int:
        return OPTIONS.batch * WORLD * (OPTIONS.steps + 1)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return IMAGE, index % 10


IMAGE = torch.randn(3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
LARGE = torch.ones(64 << 20) if FAULT in ("pageable", "checkpoint") else torch.empty(0)


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch at next to no cost, but for what is planted."""
    if FAULT == "slow-data":
        time.sleep(0.012)
    images = IMAGE.expand(len(samples), 3, SIDE, SIDE).contiguous()
    return images, torch.tensor([label for _, label in samples])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + self.second(torch.relu(self.first(images)))


class Network(nn.Module):
    def __init__(self, blocks: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(CHANNELS, 10)
        self.extra = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
        self.small = torch.ones(64, device=DEVICE)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        if FAULT == "late-device" and RANK == 1:
            repeat_products(self.extra)
        if FAULT == "launch-bound":
            launch_small_kernels(self.small)
        return self.head(hidden.mean((2, 3)))


def repeat_products(matrix: torch.Tensor) -> None:
    """Some milliseconds of matrix products that nothing needs."""
    with torch.no_grad():
        for _ in range(40):
            matrix @ matrix


def launch_small_kernels(values: torch.Tensor) -> None:
    with torch.no_grad():
        for _ in range(2500):
            values = values * 1.0001


def prepare_on_host() -> None:
    time.sleep(0.010)


def log_loss(loss: torch.Tensor) -> float:
    return loss.item()


def python_bookkeeping(milliseconds: float) -> None:
    end = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < end:
        pass


def capture_graph(matrix: torch.Tensor) -> None:
    """In the capture mode in which a CUDA event that another thread queries makes it fail."""
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        for _ in range(200):
            matrix @ matrix


def save_checkpoint(step: int) -> None:
    torch.save({"weights": LARGE, "step": step}, f"checkpoint-{RANK}.pt")


def wrapped(network: nn.Module) -> nn.Module:
    if FAULT == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in network.blocks:
            fully_shard(block)
        return fully_shard(network)
    if FAULT == "small-buckets":
        return DistributedDataParallel(network, bucket_cap_mb=0.01)
    return DistributedDataParallel(network)


def fail_at(step: int) -> None:
    """Faults that end a job, or stop it."""
    if step != 100 or RANK != WORLD - 1:
        return
    if FAULT == "sleeps":
        time.sleep(10_000)
    elif FAULT == "out-of-memory":
        torch.empty(1 << 40, dtype=torch.uint8, device=DEVICE)
    elif FAULT == "device-error":
        table = torch.zeros(10, 4, device=DEVICE)
        table[torch.full((4,), 1000, device=DEVICE)]
    elif FAULT == "other-collective":
        dist.broadcast(torch.ones(64, device=DEVICE), 0)
        synchronize()


def main() -> None:
    if CUDA:
        torch.cuda.set_device(DEVICE)
    if torch.cuda.device_count() < WORLD:
        os.environ["NCCL_HOSTID"] = f"host-{RANK}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(OPTIONS.backend, timeout=timedelta(seconds=OPTIONS.timeout))
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(FAULT == "", warn_only=True)
    model = wrapped(Network().to(DEVICE))
    forward = model
    if FAULT == "compiled":
        forward = torch.compile(model, mode="reduce-overhead")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = Images()
    loader = DataLoader(
        data,
        batch_size=OPTIONS.batch,
        sampler=DistributedSampler(data, shuffle=False),
        num_workers=0 if FAULT == "slow-data" else 2,
        collate_fn=collate,
        pin_memory=CUDA,
        drop_last=True,
    )
    half = FAULT != "float32"
    kept = []
    profiler = None
    if OPTIONS.profile:
        profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=40, warmup=2, active=4, repeat=1),
            on_trace_ready=torch.profiler.tensorboard_trace_handler(OPTIONS.profile),
            with_stack=True,
        )
        profiler.start()
    losses = []
    step_ends = []
    began = 0.0
    for step, (images, labels) in enumerate(loader):
        if step == OPTIONS.steps:
            break
        if step == UNTIMED:
            synchronize()
            began = time.perf_counter()
        if FAULT == "pageable":
            LARGE.to(DEVICE)
        images = images.to(DEVICE, non_blocking=True)
        labels = labels.to(DEVICE, non_blocking=True)
        if FAULT == "late-host" and RANK == 1:
            prepare_on_host()
        if FAULT == "barrier":
            dist.barrier()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE.type, torch.bfloat16) if half else nullcontext():
            loss = nn.functional.cross_entropy(forward(images), labels)
        loss.backward()
        fail_at(step)
        optimizer.step()
        if FAULT == "item":
            log_loss(loss)
            python_bookkeeping(OPTIONS.loop_ms)
        if FAULT == "python":
            python_bookkeeping(5)
        if FAULT == "graph" and step < 80:
            capture_graph(model.module.extra)
        if FAULT == "leak":
            kept.append(torch.ones(4 << 20, device=DEVICE))
        if FAULT == "checkpoint" and step % 50 == 49:
            save_checkpoint(step)
        step_ends.append(time.perf_counter())
        if step % 50 == 49:
            losses.append(loss.detach())
        if profiler is not None:
            profiler.step()
    synchronize()
    ended = time.perf_counter()
    if profiler is not None:
        profiler.stop()
    found = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        found.update(local.detach().cpu().numpy().tobytes())
    if OPTIONS.truth:
        truth = {
            "step_ms": (ended - began) / (OPTIONS.steps - UNTIMED) * 1e3,
            "host_ms": [round((end - begin) * 1e3, 3) for begin, end in pairwise(step_ends)],
            "losses": [float(loss) for loss in losses],
            "parameters": found.hexdigest(),
            "device": torch.cuda.get_device_name(DEVICE) if CUDA else "cpu",
        }
        Path(f"{OPTIONS.truth}.{RANK}").write_text(json.dumps(truth))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
