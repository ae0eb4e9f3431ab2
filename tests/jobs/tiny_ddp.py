"""A DDP job of a few steps, for whatever starts ranks: it takes its rank from torchrun's, Slurm's or MPI's variables.

    torchrun --nproc-per-node 2 tiny_ddp.py [--steps N] [--store FILE] [--fail-at N --how raise|kill|term --attempts N]

Rank 0 prints how many steps it took. With ``--fail-at`` the last rank ends itself at that step, in its first attempts.
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def from_environment(names: tuple[str, ...]) -> int:
    return next(int(os.environ[name]) for name in names if name in os.environ)


def fail(how: str) -> None:
    if how == "raise":
        raise RuntimeError("planted")
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGTERM)


def end_in_order() -> None:
    """Without the teardown of Gloo, which sometimes aborts."""
    dist.barrier()
    sys.stdout.flush()
    atexit._run_exitfuncs()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument(
        "--store", default=None, help="file for the rendezvous; default: MASTER_ADDR and MASTER_PORT"
    )
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--how", choices=["raise", "kill", "term"], default="raise")
    parser.add_argument("--attempts", type=int, default=1, help="how many attempts fail")
    options = parser.parse_args()
    rank, world_size = from_environment(RANK), from_environment(WORLD_SIZE)
    where = f"file://{options.store}" if options.store else "env://"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
    fails = (
        int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) < options.attempts and rank == world_size - 1
    )
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(options.steps):
        if fails and step == options.fail_at:
            fail(options.how)
        time.sleep(options.step_ms / 1000)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"took {options.steps} steps")
    end_in_order()


if __name__ == "__main__":
    main()
