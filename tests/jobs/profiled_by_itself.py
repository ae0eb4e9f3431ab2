"""A job with a profiler schedule of its own, built before or during the steps in which ddpdoctor would
profile.

torchrun --nproc-per-node 2 profiled_by_itself.py --build-at N --out FOLDER
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from tiny_ddp import end_in_order
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--build-at", type=int, default=0)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def save(finished: profile) -> None:
        finished.export_chrome_trace(f"{options.out}/own-{rank}.json")

    own = None
    for number in range(30):
        if number == options.build_at:
            own = profile(
                activities=[ProfilerActivity.CPU],
                schedule=schedule(wait=1, warmup=4, active=3, repeat=1),
                on_trace_ready=save,
            )
            own.start()
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        if own is not None:
            own.step()
    own.stop()
    end_in_order()


if __name__ == "__main__":
    main()
