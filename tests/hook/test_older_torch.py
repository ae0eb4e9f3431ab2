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


@pytest.fixture
def recorded(tmp_path) -> Recorded:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text(OLDER)
    base = plain_environment(PYTHONPATH=str(tmp_path / "own"))
    base.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    command = [sys.executable, str(JOBS / "plain_ddp.py"), "--steps", "12", "--barrier", "--exit-hard"]
    return run_recorded(tmp_path, command, HookOptions(profile_steps=(4, 7)), base)


def test_what_an_older_torch_lacks_is_missing_data(recorded: Recorded) -> None:
    assert (recorded.process.returncode, recorded.process.stdout) == (0, "done 12\n"), recorded.process.stderr
    assert recorded.process.stderr == ""
    assert recorded.info(0)["hook"]["errors"] == []
    assert len(recorded.steps(0)) == 12
    assert len([event for event in recorded.events(0, "bwd") if event["sync"]]) == 12
    assert recorded.info(0)["window"]["state"] == "saved"
    assert not (recorded.folder(0) / "flight.json").exists()
