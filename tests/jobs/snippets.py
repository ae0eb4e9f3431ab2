"""Executes snippets of fixes in a two-rank job that supplies the names they take from a script.

    torchrun --nproc-per-node 2 snippets.py CASES RESULTS SECONDS

CASES is a JSON list of objects: "key"; "before", "step" and "after", code at its place around the loop; "place", which says what the
snippet replaces; "wraps", whether it makes the model a DistributedDataParallel; "scene", where its step stands; "unused",
"accumulates", "adam", "uneven". A case may take SECONDS; then the job ends, with its stacks on stderr. Each result is a line of
RESULTS: the case's key, an error, and how the parameters compare with those of the same training without the snippet.
"""

import collections
import contextlib
import faulthandler
import functools
import gc
import itertools
import json
import os
import sys
import threading
import time
import traceback
import tracemalloc
import types
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

STEPS, BATCH, WIDTH = 4, 4, 8


class Net(torch.nn.Module):
    def __init__(self, unused=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, 1)
        self.register_buffer("mask", torch.ones(WIDTH))
        self.unused_head = torch.nn.Linear(WIDTH, 2) if unused else None

    def forward(self, x):
        x = self.norm(x) * self.mask.to(x.dtype)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


class Samples(Dataset):
    """Also what a user's own class has that snippets name."""

    paths = tuple(range(64))

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((WIDTH,), float(index)), torch.zeros(1)


def names(rank):
    """What a training script has; a new set for each case."""
    data, generator = Samples(), torch.Generator().manual_seed(rank)
    x, y = (
        torch.randn(BATCH, WIDTH, generator=generator),
        torch.randn(BATCH, 1, generator=generator),
    )
    given = {
        "batch": (x, y), "x": x, "y": y, "rank": rank, "local_rank": rank, "world_size": 2, "device": torch.device("cpu"), "lr": 1e-2,
        "batch_size": BATCH, "dataset": data, "val_set": data, "epochs": 2, "epoch": 0, "loss_fn": F.mse_loss, "loss": torch.tensor(1.0),
        "sampler": DistributedSampler(data), "loader": DataLoader(data, batch_size=BATCH), "num_workers": 1, "N": 1,
        "micro_batches": [(x, y), (x + 1, y)], "accuracy": torch.tensor(0.5), "grad_norm": torch.tensor(1.0),
        "correct": torch.tensor(1.0), "count": torch.tensor(2.0), "total": torch.tensor(2.0), "metrics": {"loss": torch.tensor(1.0)},
        "outputs": [], "output": torch.zeros(1), "losses": [], "teacher": lambda batch: batch[0].sum(1, keepdim=True),
        "background": ThreadPoolExecutor(1), "buckets": [1, 2, 3], "lengths": [3 + i % 7 for i in range(800)],
        "block": torch.nn.Linear(WIDTH, WIDTH), "backend": "gloo", "lock": threading.Lock(), "step": 0, "url": "", "body": {},
        "requests": types.SimpleNamespace(post=lambda url, json, timeout: None), "path": "state", "data": None,
        "cv2": types.SimpleNamespace(setNumThreads=lambda count: None),
        "running": torch.zeros(()), "running_loss": torch.zeros(()),
        "save": lambda *_: None, "guarded": lambda: None, "state": {"weight": torch.ones(3)}, "takes_branch": lambda x: False,
        "val_loader": [(x, y)], "do_it": str, "write_log": lambda *_: None, "update_metrics": lambda *_: None,
        "log_metrics": lambda *_: None, "compute_metrics": len, "decode": lambda path: path, "samples": lambda: range(10),
        "upload": lambda path: None, "create_model": lambda: Net(),
        "evaluate": lambda model, loader: sum((model(x).sum().detach().reshape(1) for x, _ in loader), torch.zeros(1)),
    }  # fmt: skip
    modules = {
        "torch": torch, "dist": dist, "F": F, "DataLoader": DataLoader, "DistributedSampler": DistributedSampler,
        "DistributedDataParallel": DistributedDataParallel, "DDP": DistributedDataParallel, "contextlib": contextlib,
        "collections": collections, "functools": functools, "gc": gc, "itertools": itertools, "os": os, "sys": sys, "time": time,
        "numpy": numpy, "np": numpy, "tracemalloc": tracemalloc, "timedelta": timedelta, "profile": torch.profiler.profile,
        "ProfilerActivity": torch.profiler.ProfilerActivity,
    }  # fmt: skip
    return {**given, **modules, "__name__": "__main__"}


def train(case, rank):
    """The parameters after a few steps with the snippet at its place.

    tracemalloc is not stopped: while a thread of torch allocates, that ends in a segmentation fault (CPython issue 128679).
    """
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    here = names(rank)
    if "outputs.append(" not in case["step"]:
        here["outputs"] = here["x"]
    here["model"] = Net(case["unused"])
    kind = torch.optim.AdamW if case["adam"] else functools.partial(torch.optim.SGD, momentum=0.9)
    if not case["wraps"]:
        here["model"] = DistributedDataParallel(here["model"], find_unused_parameters=case["unused"])
        here["optimizer"] = kind(here["model"].parameters(), lr=1e-2)
    exec(case["before"], here)
    model = here["model"]
    kinds = (
        DistributedDataParallel,
        torch.distributed.fsdp.FSDPModule,
        torch.distributed.fsdp.FullyShardedDataParallel,
    )
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, kinds), f"the model is a {type(model).__name__}"
    optimizer = here.setdefault("optimizer", kind(model.parameters(), lr=1e-2))

    def train_step(batch=here["batch"]):
        here["output"] = model(batch[0])
        here["loss"] = F.mse_loss(here["output"], batch[1])
        here["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    here["train_step"] = train_step
    if case["place"] == "loop":
        here["loader"] = [here["batch"]] * (STEPS + (rank if case["uneven"] else 0))
        here["epochs"] = 1
        exec(case["step"], here)
    for step in range(STEPS if case["place"] != "loop" else 0):
        here["step"] = step
        here["x"], here["y"] = here["batch"]
        if case["place"] == "train":
            exec(case["step"], here)
        elif case["scene"] in ("accumulates", "no_sync"):
            _accumulate(here, optimizer, case)
        else:
            here["loss"] = F.mse_loss(model(here["x"]), here["y"])
            if case["place"] == "update":
                exec(case["step"], here)
            else:
                here["loss"].backward()
                optimizer.step()
            optimizer.zero_grad()
            if case["place"] == "update":
                continue
            if case["scene"] == "all" or rank == 0:
                exec(case["step"], here)
    exec(case["after"], here)
    if "dcp" in here:
        _restore(optimizer, functools.partial(kind, lr=1e-2))
    here["background"].shutdown()
    gc.enable()
    gc.unfreeze()
    return [_whole(each.detach()).clone() for each in model.parameters()]


def _restore(optimizer, kind):
    """The last checkpoint, loaded into a new model and optimizer, which then has the state of ``optimizer``."""
    model = DistributedDataParallel(Net())
    new = kind(model.parameters())
    weights, state = get_state_dict(model, new)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=f"checkpoints/{STEPS - 1}")
    set_state_dict(model, new, model_state_dict=weights, optim_state_dict=state)
    assert len(new.state) == len(optimizer.state) > 0, "the checkpoint has no state of the optimizer"


def _whole(parameter):
    """A parameter that fully_shard divided, gathered from all ranks."""
    return parameter.full_tensor() if isinstance(parameter, torch.distributed.tensor.DTensor) else parameter


def load(case, rank):
    """A few batches of the snippet's loader. No training comes before it: its worker processes are forks of this process."""
    here = names(rank)
    exec(case["before"], here)
    exec(case["after"], here)
    for _, batch in zip(range(3), here["loader"]):
        assert batch is not None


def _accumulate(here, optimizer, case):
    """A step of two micro-batches; in the scene ``no_sync`` the snippet stands inside it."""
    inside = case["scene"] == "no_sync"
    for number, (x, y) in enumerate(here["micro_batches"]):
        with here["model"].no_sync() if inside and number == 0 else contextlib.nullcontext():
            F.mse_loss(here["model"](x), y).div(2).backward()
            if inside and number == 0:
                exec(case["step"], here)
    optimizer.step()
    optimizer.zero_grad()


def _compared(got, usual):
    pairs = list(zip(got, usual))
    assert len(got) == len(usual), "the model has other parameters"
    if all(torch.equal(a, b) for a, b in pairs):
        return "same bits"
    return "last bits" if all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs) else "other"


def main():
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    faulthandler.enable()
    most_s = float(sys.argv[3])
    dist.init_process_group("gloo", timeout=timedelta(seconds=most_s))
    numpy.save("data.npy", numpy.arange(8))
    rank = dist.get_rank()
    torch.set_num_threads(1)
    with open(sys.argv[2] if rank == 0 else os.devnull, "w") as results:
        run(cases, rank, most_s, results)
    dist.destroy_process_group()


def run(cases, rank, most_s, results):
    usual = {}
    for case in cases:
        found = {"key": case["key"]}
        if case["place"] == "loader":
            load(case, rank)
            results.write(json.dumps({**found, "results": "no training"}) + "\n")
            continue
        scene = "accumulates" if case["place"] == "train" and case["accumulates"] else case["scene"]
        baseline = (scene, case["unused"], case["adam"])
        if baseline not in usual:
            nothing = {"before": "", "step": "", "after": "", "place": "step", "wraps": False}
            usual[baseline] = train(
                {**nothing, "scene": scene, "unused": case["unused"], "adam": case["adam"]}, rank
            )
        faulthandler.dump_traceback_later(most_s + 5, exit=True)
        try:
            found["results"] = _compared(train(case, rank), usual[baseline])
        except BaseException as error:
            found["error"] = f"{type(error).__name__}: {error}"
            found["trace"] = traceback.format_exc()
        failed = torch.tensor([float("error" in found)])
        dist.all_reduce(failed)
        if failed and "error" not in found:
            found["error"] = "another rank raised an error"
        faulthandler.cancel_dump_traceback_later()
        results.write(json.dumps(found) + "\n")
        results.flush()


if __name__ == "__main__":
    main()
