"""A DDP job that stays before its first step: ``early_ddp.py start|imported|joining|joined``.

Each rank says that it is there, by a file of that name in the working directory that holds its process id; of ``joining`` only
rank 1, for which rank 0 waits in ``init_process_group``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def stay(here: str) -> None:
    rank = os.environ["RANK"]
    if sys.argv[1] != here or (here == "joining" and rank == "0"):
        return
    Path(f"{rank}.pid").write_text(str(os.getpid()))
    time.sleep(600)


def main() -> None:
    stay("start")
    import torch
    import torch.distributed as dist

    stay("imported")
    if sys.argv[1] == "joining" and os.environ["RANK"] == "0":
        Path("0.pid").write_text(str(os.getpid()))
    stay("joining")
    dist.init_process_group("gloo")
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    stay("joined")


if __name__ == "__main__":
    main()
