"""A job whose optimizer steps inside DDP's forward: the forward takes the batch, computes the loss, calls backward and steps.

    torchrun --nproc-per-node 2 steps_in_forward.py [--updates 2] [--steps 80] [--late-ms 20]

DDP is prepared just before each backward, as Lightning's manual optimization does. Rank 1 takes ``--late-ms`` longer in
each forward.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trained(nn.Module):
    """What a LightningModule with ``automatic_optimization = False`` comes down to."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
        self.options = options
        self.optimizers = [
            torch.optim.SGD(self.net.parameters(), lr=1e-3 * (1 + number))
            for number in range(options.updates)
        ]
        self.outer: list[DDP] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        (ddp,) = self.outer
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            loss = self.net(batch).square().mean()
            if dist.get_rank() == 1:
                time.sleep(self.options.late_ms / 1e3)
            ddp.require_backward_grad_sync = True
            ddp.reducer._rebuild_buckets()
            ddp.reducer.prepare_for_backward([])
            loss.backward()
            optimizer.step()
        # Else DDP would prepare itself once more as the forward ends.
        ddp.require_backward_grad_sync = False
        return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--late-ms", type=float, default=0.0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    module = Trained(options)
    ddp = DDP(module)
    module.outer.append(ddp)
    for _ in range(options.steps):
        ddp(torch.randn(32, 64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
