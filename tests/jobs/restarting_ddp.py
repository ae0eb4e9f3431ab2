"""A DDP job that saves a checkpoint every few steps, fails as planned, goes on from its checkpoint when started again, and notes the truth.

    torchrun --nproc-per-node 2 --max-restarts N restarting_ddp.py FOLDER

``FOLDER/plan.json``: ``steps``, ``every`` (steps between checkpoints), ``step_ms``, ``timeout_s`` of the process group, and ``ends``, one
for each attempt that fails: ``{"step": steps of the job done before it, "rank": R, "how": HOW, "code": C}``; "early" is before the
process group. A file that rank 0 writes counts the attempts with one. Each rank appends lines to ``FOLDER/truth-RANK.jsonl``.
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FOLDER = Path(sys.argv[1])
PLAN = json.loads((FOLDER / "plan.json").read_text())
ALL = -1
"""As the rank of an end: each of them."""
RANK = int(os.environ["RANK"])


def note(**fields: Any) -> None:
    with open(FOLDER / f"truth-{RANK}.jsonl", "a") as file:
        file.write(json.dumps({"at_ns": time.time_ns(), **fields}) + "\n")


def fail(how: str, code: int) -> None:
    note(what="failed", how=how, code=code)
    if how == "raise":
        raise RuntimeError("planted")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "abort":
        os.abort()
    if how == "hang":
        time.sleep(600)
    if how == "lock":
        ctypes.PyDLL(None).sleep(600)  # holds Python's lock
    os._exit(code)


def attempt_number() -> int:
    """The same on all ranks, counted from 0."""
    counter = FOLDER / "attempts"
    number = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        number += int(counter.read_text()) + 1 if counter.exists() else 0
        counter.write_text(str(int(number)))
    dist.broadcast(number, 0)
    return int(number)


def main() -> None:
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    end = PLAN["ends"][number] if number < len(PLAN["ends"]) and "WITHOUT_ENDS" not in os.environ else {}
    if end.get("how") == "early" and end["rank"] == RANK:
        fail("early", end["code"])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PLAN.get("timeout_s", 60)))
    attempt = attempt_number()
    torch.manual_seed(0)
    net = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    done, saved = 0, FOLDER / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved)
        done = state["done"]
        net.load_state_dict(state["net"])
    model = DistributedDataParallel(net)
    note(what="started", attempt=attempt, done=done, world=dist.get_world_size(), pid=os.getpid())
    while done < PLAN["steps"]:
        if done == end.get("step") and end["rank"] in (dist.get_rank(), ALL):
            fail(end["how"], end["code"])
        time.sleep(PLAN["step_ms"] / 1000)
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        note(what="step", done=done)
        if PLAN["every"] and done % PLAN["every"] == 0 and done < PLAN["steps"]:
            if dist.get_rank() == 0:
                torch.save({"done": done, "net": net.state_dict()}, f"{saved}.new")
                os.replace(f"{saved}.new", saved)
            dist.barrier()
    dist.barrier()
    note(what="ended")
    sys.stdout.flush()
    dist.destroy_process_group()
    atexit._run_exitfuncs()
    os._exit(0)  # without the teardown of Gloo, which sometimes aborts


if __name__ == "__main__":
    main()
