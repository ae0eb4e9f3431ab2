"""A small DDP job of which one rank spends long on something healthy, while the others wait for it.

``--how`` names it, ``--at`` the step, ``--for-s`` for how long it takes; afterwards all ranks take the remaining steps.
Where it begins and ends it leaves ``slow.RANK`` and ``done.RANK`` in the working directory, with its process id.
"""

from __future__ import annotations

import argparse
import code
import collections
import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

URL = os.environ.get("SLOW_URL", "")
"""Answers for ever, a little at a time."""
PIPE = os.environ.get("SLOW_PIPE", "")
"""A named pipe to which somebody writes a little at a time."""
COPY = os.environ.get("SLOW_COPY", "")
"""A file that takes long to read."""
COMPUTES = (
    "import sys, time\nends = time.monotonic() + float(sys.argv[1])\n"
    "while time.monotonic() < ends:\n    sum(i * i for i in range(10_000))\n"
)
DOWNLOADS = (
    "import sys, time, urllib.request\nends = time.monotonic() + float(sys.argv[1])\n"
    "answer = urllib.request.urlopen(sys.argv[2])\n"
    "while time.monotonic() < ends:\n    answer.read(65536)\n"
)


def writes_a_checkpoint(seconds: float) -> None:
    ends = time.monotonic() + seconds
    with open("checkpoint.safetensors", "wb", buffering=0) as file:
        while time.monotonic() < ends:
            file.write(os.urandom(200_000))
            os.fsync(file.fileno())
            time.sleep(0.2)


def copies_a_file(seconds: float) -> None:
    shutil.copy(COPY, "copied")


def copies_from_a_pipe(seconds: float) -> None:
    with open(PIPE, "rb", buffering=0) as source, open("copied", "wb") as target:
        shutil.copyfileobj(source, target)


def scores(predicted: list[list[int]], wanted: list[list[int]]) -> dict[str, float]:
    """Overlap of word groups, as metrics for translations count it."""
    found: dict[str, float] = {}
    for length in (1, 2, 3, 4):
        hits = total = 0
        for ours, theirs in zip(predicted, wanted, strict=True):
            groups = collections.Counter(tuple(ours[i : i + length]) for i in range(len(ours)))
            known = collections.Counter(tuple(theirs[i : i + length]) for i in range(len(theirs)))
            hits += sum(min(count, known[group]) for group, count in groups.items())
            total += sum(groups.values())
        found[f"overlap of {length}"] = hits / total
    return found


def scores_in_python(seconds: float) -> None:
    ends = time.monotonic() + seconds
    all_scores = []
    while time.monotonic() < ends:
        lines = [[random.randrange(200) for _ in range(60)] for _ in range(100)]
        all_scores.append(scores(lines, [line[::-1] for line in lines]))


def scores_in_numpy(seconds: float) -> None:
    ends = time.monotonic() + seconds
    curves = []
    while time.monotonic() < ends:
        guesses, truth = np.random.rand(300_000), np.random.rand(300_000) > 0.5
        hits = truth[np.argsort(-guesses)].cumsum()
        curves.append((hits / np.arange(1, len(hits) + 1))[::1000].copy())


def one_long_chain_in_torch(seconds: float) -> None:
    """Gram matrices of features, without a thought of ``eval()``."""
    ends = time.monotonic() + seconds
    features = torch.rand(700, 700)
    while time.monotonic() < ends:
        features = torch.linalg.matrix_exp(torch.tanh(features @ features.T / 700))


def one_long_call_in_numpy(seconds: float) -> None:
    """As long a singular value decomposition as it takes, in a single call."""
    size, took_s = 300, 0.0
    while took_s < 0.2:
        size = int(size * 1.2)
        began_s = time.monotonic()
        np.linalg.svd(np.random.rand(size, size))
        took_s = time.monotonic() - began_s
    size = int(size * (seconds / took_s) ** (1 / 3))
    np.linalg.svd(np.random.rand(size, size))


def waits_for_a_child_that_computes(seconds: float) -> None:
    subprocess.run([sys.executable, "-c", COMPUTES, str(seconds)], check=True)


def waits_for_a_child_that_downloads(seconds: float) -> None:
    subprocess.run([sys.executable, "-c", DOWNLOADS, str(seconds), URL], check=True)


def waits_for_a_grandchild(seconds: float) -> None:
    subprocess.run(
        ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", COMPUTES, str(seconds)], check=True
    )


def downloads_to_memory(seconds: float) -> None:
    ends = time.monotonic() + seconds
    parts = []
    with urllib.request.urlopen(URL) as answer:
        while time.monotonic() < ends:
            parts.append(answer.read(65536))


def downloads_to_a_file(seconds: float) -> None:
    ends = time.monotonic() + seconds
    with urllib.request.urlopen(URL) as answer, open("downloaded", "wb") as file:
        while time.monotonic() < ends:
            file.write(answer.read(65536))


def downloads_in_a_thread(seconds: float) -> None:
    thread = threading.Thread(target=downloads_to_memory, args=(seconds,))
    thread.start()
    thread.join()


def compiles(seconds: float) -> None:
    """New networks, one after the other, as somebody's first step of a large one would."""
    ends = time.monotonic() + seconds
    width = 16
    while time.monotonic() < ends:
        width += 1
        network = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(width, width), nn.GELU())))
        torch._dynamo.reset()
        torch.compile(network)(torch.ones(4, width)).sum().backward()


def evaluates(seconds: float, model: nn.Module) -> None:
    ends = time.monotonic() + seconds
    model.eval()
    with torch.no_grad():
        while time.monotonic() < ends:
            model.module(torch.ones(64, 256))
            torch.mm(torch.ones(600, 600), torch.ones(600, 600))
    model.train()


def at_a_breakpoint(seconds: float) -> None:
    breakpoint()


def at_a_prompt(seconds: float) -> None:
    code.interact(local={})


def asks_the_user(seconds: float) -> None:
    input("Continue? ")


def reads_a_line(seconds: float) -> None:
    sys.stdin.readline()


def quiet(seconds: float) -> None:
    """For somebody who looks at it with a debugger, or for less than the limit."""
    time.sleep(seconds)


def reads_weights(seconds: float) -> None:
    with open(PIPE, "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass


def fills_shared_memory(seconds: float) -> None:
    with contextlib.suppress(OSError), open("/dev/shm/of_the_job", "wb", buffering=0) as file:
        while True:
            file.write(bytes(65536))


def takes_most_shared_memory(seconds: float) -> None:
    """58 of 64 MB, as docker's default leaves them to a job."""
    with open("/dev/shm/of_the_job", "wb") as file:
        file.write(bytes(58 << 20))


def may_not_write_files(seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def may_not_open_files(seconds: float) -> None:
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def dies(seconds: float) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def receives(seconds: float) -> None:
    """Not healthy: the others reduce, and nobody sends."""
    dist.recv(torch.ones(4), (dist.get_rank() + 1) % dist.get_world_size())


def waits_for_a_key(seconds: float) -> None:
    """Not healthy: what it waits for was to be set by a rank that is dead."""
    dist.distributed_c10d._get_default_store().wait(["written by the dead"])


BEFORE_JOINING = ("starts_in_python", "starts_reading")
BEFORE_MODEL = ("builds_in_python", "builds_reading", "second_build_in_python")
IN_LOADER = ("first_batch",)
ALIAS = {
    "starts_in_python": scores_in_python,
    "builds_in_python": scores_in_python,
    "second_build_in_python": scores_in_python,
    "starts_reading": reads_weights,
    "builds_reading": reads_weights,
    "first_batch": reads_weights,
}


def mark(name: str) -> None:
    place = Path(f"{name}.{os.environ['RANK']}")
    place.unlink(missing_ok=True)  # of the attempt before
    place.symlink_to(str(os.getpid()))  # which works also where no file may grow


class Batches:
    """Of which the first may take long to read."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in range(self.options.steps):
            if step == 0 and self.options.how in IN_LOADER and dist.get_rank() == self.options.rank:
                take_long(self.options)
            yield torch.ones(8, 256)


def take_long(options: argparse.Namespace, *more: object) -> None:
    mark("slow")
    way = ALIAS.get(options.how) or globals()[options.how]
    way(options.for_s, *more)
    mark("done")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="no")
    parser.add_argument("--at", type=int, default=30)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--for-s", type=float, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument(
        "--barrier", action="store_true", help="the others wait at a barrier, not in a reduction"
    )
    options = parser.parse_args()
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    mine = int(os.environ["RANK"]) == options.rank
    if mine and options.how in BEFORE_JOINING:
        take_long(options)
    dist.init_process_group("gloo")
    if mine and options.how in BEFORE_MODEL and (again or not options.how.startswith("second_")):
        take_long(options)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(Batches(options)):
        if step == options.at and options.how in globals():
            if options.how == "waits_for_a_key" and mine:
                dies(0)
            if mine or options.how == "waits_for_a_key":
                take_long(options, *([model] if options.how == "evaluates" else []))
            if options.barrier:
                dist.barrier()
        if step == options.at and options.how.startswith("second_") and mine and not again:
            dies(0)
        time.sleep(options.step_s)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 10:
            mark("trains")
    if dist.get_rank() == 0:
        print(f"took {options.steps} steps", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
