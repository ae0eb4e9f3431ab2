"""A job that the world around it disturbs: its machine's clock is set twice, and one of its ranks is stopped for a while.

    torchrun --nproc-per-node 2 disturbed.py [--stopped 0] [--late-ms 20]

Rank 1 is late in each step. The clock is set as the recorder sees it, in both ranks at the same moment.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SETTINGS_S = {30: -10.0, 60: 130.0}
STOPPED_IN, STOPPED_S = 45, 4.0
STEPS = 90


def set_clock(by_s: float) -> None:
    real, by_ns = time.time_ns, round(by_s * 1e9)
    time.time_ns = lambda: real() + by_ns
    recorder = sys.modules.get("_ddpdoctor.hook.recording.recorder")
    if recorder is not None:
        recorder.time_ns = time.time_ns


def stop() -> None:
    subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stopped", type=int, default=0)
    parser.add_argument("--late-ms", type=float, default=20.0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        loss = model(torch.randn(32, 64)).square().mean()
        if rank == 1:
            time.sleep(options.late_ms / 1e3)
        if step == STOPPED_IN and rank == options.stopped:
            stop()
        if step in SETTINGS_S:
            set_clock(SETTINGS_S[step])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
