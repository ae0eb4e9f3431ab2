"""Training jobs as people write them, on one GPU: each as it is (slow), and with its bottleneck removed (fixed).

python workloads.py NAME [--variant slow|fixed] [--steps 200] [--truth FILE]
python workloads.py --all-bare [NAME ...] [--seconds-each 3] [--budget 115] [--out FILE]

The first is a job of its own, for ``ddpdoctor run``. The second measures all in one process: a line of JSON for each.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from workloads_parts import (
    CUDA,
    DEVICE,
    RISING,
    Arrays,
    Clock,
    DeepMlp,
    GraphNetwork,
    Metrics,
    Molecules,
    Photographs,
    Prefetcher,
    Texts,
    Tokens,
    autocast,
    batches,
    collate_graphs,
    ddp,
    ddp_gpt,
    discriminator,
    generator,
    leave_little_memory,
    pick,
    start,
)


def train_gpt(
    clock: Clock,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    precision: Callable[[], AbstractContextManager[object]] = autocast,
) -> None:
    for tokens, targets in loader:
        tokens, targets = tokens.to(DEVICE, non_blocking=True), targets.to(DEVICE, non_blocking=True)
        with precision():
            loss = model(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if clock.step():
            break


def gpt(clock: Clock, slow: bool) -> None:
    data = Tokens()
    train_gpt(clock, *ddp_gpt(), batches(data, pick(16, 2), sampler=DistributedSampler(data)))


def gpt_fp32(clock: Clock, slow: bool) -> None:
    train_gpt(clock, *ddp_gpt(), batches(Tokens(), pick(8, 2)), nullcontext if slow else autocast)


def gpt_compiled(clock: Clock, slow: bool) -> None:
    if not CUDA:
        raise NotImplementedError("needs a GPU")
    model, optimizer = ddp_gpt(4)
    train_gpt(clock, torch.compile(model), optimizer, batches(Tokens(), 24))


def train_images(
    clock: Clock, model: nn.Module, loader: Iterable[Any], device: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """``device`` copies a tensor to the device."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for images, labels in loader:
        images, labels = device(images).contiguous(memory_format=torch.channels_last), device(labels)
        with autocast():
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if clock.step():
            break


def ddp_resnet(large: bool = False) -> nn.Module:
    from torchvision.models import resnet18, resnet50

    return ddp((resnet50 if large and CUDA else resnet18)().to(memory_format=torch.channels_last))


def without_waiting(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE, non_blocking=True)


def resnet_jpeg(clock: Clock, slow: bool) -> None:
    if slow:
        loader = DataLoader(Photographs(), batch_size=pick(64, 2), num_workers=pick(2, 1), drop_last=True)
    else:
        loader = DataLoader(
            Photographs(),
            batch_size=pick(64, 2),
            num_workers=pick(14, 2),
            pin_memory=CUDA,
            persistent_workers=True,
            prefetch_factor=4,
            drop_last=True,
        )
    train_images(clock, ddp_resnet(large=True), loader, without_waiting)


def logging_item(clock: Clock, slow: bool) -> None:
    model, optimizer = ddp_gpt()
    metrics, running = Metrics(), 0.0
    for step, (tokens, targets) in enumerate(batches(Tokens(), pick(8, 2)), 1):
        inputs, targets = tokens.to(DEVICE, non_blocking=True), targets.to(DEVICE, non_blocking=True)
        with autocast():
            loss = model(inputs, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if slow:
            running += loss.item()
            values = {"loss": loss.item(), "grad_norm": norm.item(), "running": running / step}
            report = metrics.update(step, values, tokens)
            if step % 10 == 0:
                print(f"step {step} loss {running / step:.3f} grad norm {report['grad_norm/mean']:.2f}")
        elif step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f}")
        if clock.step():
            break


def gnn(clock: Clock, slow: bool) -> None:
    data = Molecules()
    network = GraphNetwork(pick(10, 2)).to(DEVICE)
    loader = batches(data, pick(32, 2), collate_fn=collate_graphs)
    if CUDA and not slow:
        features, edges, owners, _ = (part.to(DEVICE) for part in next(iter(loader)))
        network = torch.cuda.make_graphed_callables(network, (features, edges, owners))
    model = ddp(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for features, edges, owners, labels in loader:
        features, edges = features.to(DEVICE, non_blocking=True), edges.to(DEVICE, non_blocking=True)
        owners, labels = owners.to(DEVICE, non_blocking=True), labels.to(DEVICE, non_blocking=True)
        loss = F.mse_loss(model(features, edges, owners), labels.float())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if clock.step():
            break


def accumulate(clock: Clock, slow: bool) -> None:
    model, optimizer = ddp_gpt(6)
    for index, (tokens, targets) in enumerate(batches(Tokens(), pick(8, 2))):
        tokens, targets = tokens.to(DEVICE, non_blocking=True), targets.to(DEVICE, non_blocking=True)
        last = index % 4 == 3
        with nullcontext() if last else model.no_sync():
            with autocast():
                loss = model(tokens, targets) / 4
            loss.backward()
        if not last:
            continue
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if clock.step():
            break


def gan(clock: Clock, slow: bool) -> None:
    drawer, judge = ddp(generator(pick(128, 8))), ddp(discriminator(pick(128, 8)))
    drawer_optimizer = torch.optim.Adam(drawer.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    judge_optimizer = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    batch = pick(128, 4)
    truths = torch.cat((torch.ones(batch), torch.zeros(batch))).to(DEVICE)
    for images, _ in batches(Arrays(64, count=4096), batch):
        real = images.to(DEVICE, non_blocking=True) / 127.5 - 1
        with autocast():
            fake = drawer(torch.randn(batch, 128, 1, 1, device=DEVICE))
            scores = judge(torch.cat((real, fake.detach().float())))
        judge_loss = F.binary_cross_entropy_with_logits(scores.float(), truths)
        judge_optimizer.zero_grad(set_to_none=True)
        judge_loss.backward()
        judge_optimizer.step()
        with autocast():
            fooled = judge(fake)
        drawer_loss = F.binary_cross_entropy_with_logits(fooled.float(), truths[:batch])
        drawer_optimizer.zero_grad(set_to_none=True)
        drawer_loss.backward()
        drawer_optimizer.step()
        if clock.step():
            break


@torch.no_grad()
def evaluate(model: nn.Module, loader: Iterator[list[torch.Tensor]]) -> float:
    model.eval()
    total = 0.0
    for _ in range(pick(30, 2)):
        tokens, targets = next(loader)
        with autocast():
            loss = model(tokens.to(DEVICE), targets.to(DEVICE))
        total += loss.item()
    model.train()
    return total


def evaluate_checkpoint(clock: Clock, slow: bool) -> None:
    clock.every = pick(50, 2)
    model, optimizer = ddp_gpt(6)
    held_out = iter(batches(Tokens(), pick(8, 2), workers=2))
    folder = Path(tempfile.mkdtemp())
    for step, (tokens, targets) in enumerate(batches(Tokens(), pick(8, 2)), 1):
        tokens, targets = tokens.to(DEVICE, non_blocking=True), targets.to(DEVICE, non_blocking=True)
        with autocast():
            loss = model(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if slow and step % pick(50, 2) == 0:
            print("step", step, "evaluation", evaluate(model.module, held_out))
            torch.save({"model": model.module.state_dict(), "step": step}, folder / "checkpoint.pt")
        if clock.step():
            break
    shutil.rmtree(folder)


def fp16_scaler(clock: Clock, slow: bool) -> None:
    model, _ = ddp_gpt(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(DEVICE.type)
    for tokens, targets in batches(Tokens(), pick(16, 2)):
        tokens, targets = tokens.to(DEVICE, non_blocking=True), targets.to(DEVICE, non_blocking=True)
        with autocast(pick(torch.float16, torch.bfloat16)):
            loss = model(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if clock.step():
            break


def pageable(clock: Clock, slow: bool) -> None:
    loader = batches(Arrays(pick(224, 32)), pick(256, 2), workers=6, pin_memory=CUDA and not slow)
    train_images(clock, ddp_resnet(), loader, (lambda tensor: tensor.to(DEVICE)) if slow else without_waiting)


def python_dataset(clock: Clock, slow: bool) -> None:
    train_gpt(clock, *ddp_gpt(6), batches(Texts(), pick(8, 2), workers=0 if slow else 8))


def unused(clock: Clock, slow: bool) -> None:
    side = pick(16, 4)
    model = ddp(DeepMlp(pick(200, 4), 3 * side * side), find_unused_parameters=slow)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for images, labels in batches(Arrays(side), pick(64, 2)):
        hidden = images.to(DEVICE, non_blocking=True).flatten(1) / 255
        labels = labels.to(DEVICE, non_blocking=True)
        with autocast():
            loss = F.mse_loss(model(hidden).float(), labels / 1000)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if clock.step():
            break


def memory_full(clock: Clock, slow: bool) -> None:
    clock.every = len(RISING)
    model, optimizer = ddp_gpt(6)
    if CUDA and slow:
        leave_little_memory(model, optimizer)
    for step, (tokens, targets) in enumerate(batches(Tokens(RISING, pick(16, 2)), pick(16, 2)), 1):
        tokens, targets = tokens.to(DEVICE, non_blocking=True), targets.to(DEVICE, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        if CUDA and slow and step % len(RISING) == 0:
            torch.cuda.empty_cache()
        if clock.step():
            break


def two_streams(clock: Clock, slow: bool) -> None:
    loader = batches(Arrays(pick(224, 32), torch.uint8), pick(96, 2))
    train_images(clock, ddp_resnet(large=True), Prefetcher(loader), lambda tensor: tensor)


def dynamic_shapes(clock: Clock, slow: bool) -> None:
    lengths = tuple(pick(128, 4) + index * 7 % 25 * pick(16, 1) for index in range(25))
    clock.every = pick(len(lengths), 1)
    train_gpt(clock, *ddp_gpt(), batches(Tokens(lengths, pick(16, 2)), pick(16, 2)))


Job = Callable[[Clock, bool], None]
PLAIN: tuple[Job, ...] = (
    *(gpt, gpt_fp32, resnet_jpeg, logging_item, accumulate, gan, evaluate_checkpoint, fp16_scaler, pageable),
    *(python_dataset, unused, two_streams, dynamic_shapes),
)
RISKY: tuple[Job, ...] = (gpt_compiled, memory_full, gnn)
"""Last, as what they do to a process might stay."""
JOBS: dict[str, Job] = {job.__name__.replace("_", "-"): job for job in (*PLAIN, *RISKY)}
FRAMEWORKS = ("accelerate", "hf", "lightning")
"""They start the process group themselves, if nobody did."""
NAMES = (*list(JOBS)[: len(PLAIN)], *FRAMEWORKS, *list(JOBS)[len(PLAIN) :])
HEALTHY = {
    *(
        "gpt",
        "gpt-compiled",
        "accumulate",
        "gan",
        "fp16-scaler",
        "lightning",
        "two-streams",
        "dynamic-shapes",
    ),
}
"""Nothing to fix: both variants are the same."""


def job_named(name: str) -> Job:
    """The frameworks take seconds to import, so only those that run are imported."""
    if name in FRAMEWORKS:
        return getattr(importlib.import_module("workloads_frameworks"), name)
    return JOBS[name]


def about_device() -> str:
    return torch.cuda.get_device_name(DEVICE) if CUDA else "cpu"


def run_one(options: argparse.Namespace) -> None:
    name = options.names[0]
    if name not in FRAMEWORKS:
        dist.init_process_group(pick("nccl", "gloo"))
    clock = Clock(100 if options.steps > 120 else options.steps // 2, options.steps)
    job_named(name)(clock, options.variant == "slow")
    truth = {"name": name, "variant": options.variant, **clock.measured(), "device": about_device()}
    if CUDA:
        truth["allocation_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    print(json.dumps(truth), flush=True)
    if options.truth:
        host_ms = [round((end - begin) * 1e3, 3) for begin, end in pairwise(clock.stamps)]
        Path(options.truth).write_text(json.dumps({**truth, "host_ms": host_ms}))
    if dist.is_initialized():
        dist.destroy_process_group()


def too_long(*_: Any) -> None:
    raise TimeoutError("took too long")


def measured_bare(name: str, variant: str, seconds: float) -> dict[str, Any]:
    """One variant of one job, in this process, which it leaves as it was."""
    began = time.perf_counter()
    clock = Clock(pick(60, 2), pick(360, 6), seconds, settle_s=0.5)
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) if CUDA else 0
    found: dict[str, Any] = {"name": name, "variant": variant}
    signal.alarm(60)
    if not dist.is_initialized():
        dist.init_process_group(pick("nccl", "gloo"))
    try:
        with redirect_stdout(sys.stderr):
            job_named(name)(clock, variant == "slow")
        found.update(clock.measured())
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[:300]
        traceback.print_exc()
    finally:
        signal.alarm(0)
    found["same"] = name in HEALTHY
    torch.compiler.reset()
    gc.collect()
    if CUDA:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
        found["peak_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
        found["allocation_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0) - retries
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found["whole_s"] = round(time.perf_counter() - began, 2)
    return found


def run_all(options: argparse.Namespace) -> None:
    """Each for less than ``--seconds-each`` where the budget would not do for all."""
    signal.signal(signal.SIGALRM, too_long)
    end = time.perf_counter() + options.budget
    lines = [{"device": about_device(), "torch": torch.__version__, "cores": os.cpu_count()}]
    lines[0]["shm_gb"] = round(shutil.disk_usage("/dev/shm").free / 1e9, 1)
    print(json.dumps(lines[0]), flush=True)
    names = options.names or NAMES
    todo = [(name, variant) for name in names for variant in ("fixed", "slow")[name in HEALTHY :]]
    for number, (name, variant) in enumerate(todo):
        to_compile_s = pick(25, 0) if ("gpt-compiled", "slow") in todo[number:] else 0
        share = (end - time.perf_counter() - to_compile_s) / (len(todo) - number)
        lines.append(measured_bare(name, variant, max(0.7, min(options.seconds_each, share - 2.0))))
        print(json.dumps(lines[-1]), flush=True)
        if options.out:
            Path(options.out).write_text("".join(json.dumps(line) + "\n" for line in lines))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help=", ".join(NAMES))
    parser.add_argument("--variant", choices=("slow", "fixed"), default="slow")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--truth", default="")
    parser.add_argument("--all-bare", action="store_true")
    parser.add_argument("--seconds-each", type=float, default=3.0)
    parser.add_argument("--budget", type=float, default=115.0, help="seconds for all together")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    if not set(options.names) <= set(NAMES):
        parser.error("the jobs are " + ", ".join(NAMES))
    start()
    if options.all_bare:
        run_all(options)
    elif len(options.names) == 1:
        run_one(options)
    else:
        parser.error("name one job")


if __name__ == "__main__":
    main()
