"""A small DDP job of which one rank stops in one of several ways, or merely seems to.

``--how`` names it, ``--at`` the step, ``--for-s`` for how long, ``--rank`` the rank, -1 all of them; it ends by itself where that is over.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NEVER = threading.Lock()
NEVER.acquire()


def asleep_in_a_lock(seconds: float) -> None:
    NEVER.acquire(timeout=seconds)


def in_a_loop(seconds: float) -> None:
    ends = time.monotonic() + seconds
    turns = 0
    while time.monotonic() < ends:
        turns += 1


def in_c_with_the_lock(seconds: float) -> None:
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    ends = (ctypes.c_long * 2)(int(time.time() + seconds), 0)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, ends)


def in_a_pattern(seconds: float) -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def extra_barrier(seconds: float) -> None:
    dist.barrier()


def raising(seconds: float) -> None:
    try:
        raise KeyError("sample 17")
    except KeyError as error:
        raise ValueError("a bad sample at https://user:hidden@example.org/17") from error


def raising_beside_a_thread(seconds: float) -> None:
    threading.Thread(target=asleep_in_a_lock, args=(seconds,), name="uploader").start()
    raising(seconds)


def killed(seconds: float) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault(seconds: float) -> None:
    ctypes.string_at(0)


def in_storage(seconds: float) -> None:
    """Writes to a file system that does not answer."""
    with open(f"{os.environ['DDPDOCTOR_TEST_STORAGE']}/file", "w") as file:
        file.write("x")


def deaf(seconds: float) -> None:
    """Goes on whoever asks it to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Killing(torch.utils.data.Dataset[torch.Tensor]):
    """Of which the worker that makes the fourth sample is killed."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> torch.Tensor:
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(8)


def worker_killed(seconds: float) -> None:
    for _ in torch.utils.data.DataLoader(Killing(), batch_size=2, num_workers=1):
        pass


class Waiting(Killing):
    """Whose fourth sample never comes."""

    def __getitem__(self, number: int) -> torch.Tensor:
        if number == 3:
            NEVER.acquire(timeout=600)
        return torch.ones(8)


def no_input(seconds: float) -> None:
    for _ in torch.utils.data.DataLoader(Waiting(), batch_size=2):
        pass


def out_of_memory(seconds: float) -> None:
    taken = []
    while True:
        taken.append(b"x" * (32 << 20))


def before_joining(seconds: float) -> None:
    """Waits for something before it asks for its process group."""
    time.sleep(seconds)


def second_group(store: dist.Store, absent: int, seconds: float) -> None:
    """Trains a second time in the same process: the rank ``absent`` does not join the group, -1: all wait for one that does not."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == absent:
        time.sleep(seconds)
    prefix = dist.PrefixStore(f"second {rank if absent < 0 else ''}", store)
    dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world_size)


class Launching(nn.Module):
    """A forward whose launches wait for a device: a thread of CUDA that waits uses a core."""

    def forward(self, seconds: float) -> None:
        in_a_loop(seconds)


def behind_a_device(seconds: float) -> None:
    """As with NCCL: the last rank sleeps, and the others wait on their devices; their hosts ran ahead until the queue was full."""
    rank, asleep = dist.get_rank(), dist.get_world_size() - 1
    finished = 60
    queued = {
        "last_enqueued_collective": str(finished + (0 if rank == asleep else 4)),
        "last_completed_collective": str(finished),
    }
    nothing = {
        "comm_lib_version": "",
        "nccl_comm_state": {},
        "pg_config": {},
        "pg_status": {},
        "version": "2.10",
    }

    def dump(document: dict[str, Any]) -> Callable[..., bytes]:
        return lambda includeCollectives, onlyActive: json.dumps(document, separators=(",", ":")).encode()

    c10d = torch._C._distributed_c10d
    before = vars(c10d).copy()
    c10d._dump_nccl_trace_json = dump(nothing | {"pg_status": {"0": queued}})
    c10d._dump_fr_trace_json = dump(nothing)
    if rank == asleep:
        asleep_in_a_lock(seconds)
    else:
        Launching()(seconds)
    vars(c10d).pop("_dump_nccl_trace_json")
    vars(c10d).update(before)


ELSEWHERE = ("no", "before_joining", "second_group")
"""What does not happen in the training loop."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="no")
    parser.add_argument("--at", type=int, default=30)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--for-s", type=float, default=60)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-s", type=float, default=0.02)
    options = parser.parse_args()
    if options.how == "before_joining" and int(os.environ["RANK"]) == options.rank:
        before_joining(options.for_s)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(options.steps):
        concerned = options.rank in (rank, -1) or options.how == behind_a_device.__name__
        if step == options.at and concerned and options.how not in ELSEWHERE:
            globals()[options.how](options.for_s)
        time.sleep(options.step_s)
        loss = model(torch.ones(8, 256)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"took {options.steps} steps", flush=True)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    if options.how == "second_group":
        second_group(store, options.rank, options.for_s)


if __name__ == "__main__":
    main()
