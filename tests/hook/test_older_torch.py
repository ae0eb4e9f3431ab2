"""A torch that lacks what newer ones have: its data is missing, and nothing is said about it."""

from __future__ import annotations

import sys

import pytest

from .recording import JOBS, HookOptions, Recorded, plain_environment, run_recorded

OLDER = """
import importlib

install = importlib.import_module("_ddpdoctor.hook.install")
sound = install.install


def drop(owner, *names):
    for name in names:
        if name in vars(owner):
            delattr(owner, name)


def older():
    import sys
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    drop(torch._C._distributed_c10d, "_dump_fr_trace_json", "_dump_nccl_trace_json")
    drop(torch._C._autograd, "_get_sequence_nr")
    drop(c10d, "_get_all_pg_configs")
    sys.modules.pop("torch.amp.grad_scaler")
    for name in ("init_process_group", "barrier", "all_reduce"):
        undecorated = vars(c10d)[name].__wrapped__
        for module in (dist, c10d):
            setattr(module, name, undecorated)
    newer = {name: vars(c10d)[name] for name in ("all_gather_single", "reduce_scatter_single", "monitored_barrier")}
    for module in (dist, c10d):
        drop(module, *newer)
    sound()
    # Other parts of this torch cannot do without.
    for module in (dist, c10d):
        vars(module).update(newer)


install.install = older
"""

UNHOOKING = """
import functools
import importlib
import inspect

install = importlib.import_module("_ddpdoctor.hook.install")
sound = install.install


def older():
    import torch
    from torch._dynamo.eval_frame import TorchPatcher

    newer = TorchPatcher.patch

    @functools.lru_cache(None)
    def patch():
        newer()
        for optimizer in vars(torch.optim).values():
            if inspect.isclass(optimizer) and "step" in vars(optimizer):
                if getattr(optimizer.step, "hooked", False):
                    optimizer.step = optimizer.step.__wrapped__
                optimizer.step.hooked = True

    TorchPatcher.patch = staticmethod(patch)
    sound()


install.install = older
"""
"""As torch 2.1 compiles."""

COMPILING = """
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(nn.Linear(4, 1))


class Own(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


optimizers = [torch.optim.SGD(model.parameters(), lr=0.01)]
compiled = torch.compile(model, backend="eager")
optimizers += [torch.optim.Adam(model.parameters()), Own(model.parameters(), lr=0.01)]
for optimizer in optimizers:
    for _ in range(4):
        optimizer.zero_grad()
        compiled(torch.ones(2, 4)).sum().backward()
        optimizer.step()
once = torch.optim.SGD.step
torch.compile(model.module, backend="eager")
with contextlib.suppress(ZeroDivisionError):
    optimizers[1].step(lambda: 1 / 0)
for optimizer in optimizers[:2]:
    optimizer.step()
print(once is torch.optim.SGD.step)
"""


def run_older(tmp_path, older: str, command: list[str], options: HookOptions) -> Recorded:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text(older)
    base = plain_environment(PYTHONPATH=str(tmp_path / "own"))
    base.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    return run_recorded(tmp_path, command, options, base)


@pytest.fixture
def recorded(tmp_path) -> Recorded:
    command = [sys.executable, str(JOBS / "plain_ddp.py"), "--steps", "12", "--barrier", "--exit-hard"]
    return run_older(tmp_path, OLDER, command, HookOptions(profile_steps=(4, 7)))


@pytest.mark.extended
def test_what_an_older_torch_lacks_is_missing_data(recorded: Recorded) -> None:
    assert (recorded.process.returncode, recorded.process.stdout) == (0, "done 12\n"), recorded.process.stderr
    assert recorded.process.stderr == ""
    assert recorded.info(0)["hook"]["errors"] == []
    assert len(recorded.steps(0)) == 12
    assert len([event for event in recorded.events(0, "bwd") if event["sync"]]) == 12
    assert recorded.info(0)["window"]["state"] == "saved"
    assert not (recorded.folder(0) / "flight.json").exists()


@pytest.mark.extended
def test_a_compiler_that_takes_the_hooks_off_optimizers(tmp_path) -> None:
    (tmp_path / "job.py").write_text(COMPILING)
    command = [sys.executable, str(tmp_path / "job.py")]
    recorded = run_older(tmp_path, UNHOOKING, command, HookOptions(profile_steps=None))
    assert recorded.process.returncode == 0, recorded.process.stderr
    assert recorded.process.stdout == "True\n"
    assert recorded.info(0)["hook"]["errors"] == []
    assert [event["o"] for event in recorded.events(0, "opt")] == [*[0] * 4, *[1] * 4, *[2] * 4, 0, 1]
    assert [step["ev"][-1]["k"] for step in recorded.steps(0)[:12]] == ["opt"] * 12
