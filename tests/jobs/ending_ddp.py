"""A DDP job of twelve steps whose last rank ends in one of several ways, the others in order.

    torchrun --nproc-per-node 2 ending_ddp.py HOW
    python ending_ddp.py HOW --spawn                    # by torch.multiprocessing
    mpiexec -n 2 python ending_ddp.py HOW STORE         # and under srun: STORE is a file for the rendezvous

``AMID`` and ``AFTER`` have them: in the middle of the training, and after the last step.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
from tiny_ddp import RANK, WORLD_SIZE, from_environment
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, AT = 12, 7
AFTER = {
    "destroyed": lambda: None,
    "exit0": lambda: os._exit(0),
    "exit1": lambda: os._exit(1),
    "systemexit1": lambda: sys.exit(1),
    "killed_after": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
"""Once the process group is destroyed."""
AMID = {
    "exit0_amid": lambda: os._exit(0),
    "systemexit3": lambda: sys.exit(3),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
}
"""In a step, where the others need it."""


def work(rank: int, world_size: int, how: str, store: str) -> None:
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    steps = STEPS
    if how == "resumed":
        # The second attempt has less left to do than the first has done.
        how, steps = ("killed", STEPS) if attempt == 0 else ("destroyed", 3)
    where = f"file://{store}" if store else "env://"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
    last = rank == world_size - 1
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        if step == AT and last and how in AMID:
            time.sleep(0.3)
            AMID[how]()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"took {steps} steps", flush=True)
    dist.barrier()
    # Gloo's thread lets go of the barrier, for which it needs Python's lock. Without this pause one job in fifteen deadlocks in torch 2.13,
    # with and without a recording: the destructor of the process group waits for that thread with the lock held
    # (https://github.com/pytorch/pytorch/issues/56297).
    time.sleep(0.3)
    if how == "killed_all":
        # As a controller ends its workers, which it no longer needs: the process group is not destroyed.
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()
    if last:
        AFTER.get(how, AFTER["destroyed"])()


def main() -> None:
    how, *more = sys.argv[1:]
    if more == ["--spawn"]:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(work, args=(2, how, os.path.join(folder, "store")), nprocs=2)
    else:
        work(from_environment(RANK), from_environment(WORLD_SIZE), how, more[0] if more else "")


if __name__ == "__main__":
    main()
