"""Breaks every function of the hook in turn, and trains a little under each: nothing may reach the training
loop.

Run by the tests under the hook, as one process. Prints ``FUNCTION: error`` for each error that got out, then
how many were tried.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import time
import types
import warnings

import fake_cuda
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

GUARDS = {
    "around.<locals>.wrapper",
    "guarded.<locals>.callback",
    "WeakMap.hold.<locals>.forget",
    "_after_optimizer_step",
}
"""What catches errors, those of what it does itself too."""
TEST_ONLY = {"Patches.suspend", "Patches.resume"}


def functions() -> list[types.FunctionType]:
    """Every function object of the hook, methods and closures included."""
    found = [
        thing
        for thing in gc.get_objects()
        if type(thing) is types.FunctionType
        and thing.__code__.co_filename.startswith(os.path.dirname(sys.modules["_ddpdoctor.hook"].__file__))
        and thing.__code__.co_name not in ("<lambda>",)
        and thing.__code__.co_qualname not in GUARDS | TEST_ONLY
        and not thing.__code__.co_filename.endswith("sitecustomize.py")
    ]
    return sorted(found, key=lambda thing: (thing.__module__, thing.__code__.co_qualname))


def raising(code: types.CodeType) -> types.CodeType:
    """Code that raises at once, with the closure variables of ``code``."""
    names = ", ".join(code.co_freevars)
    source = "def outer():\n"
    source += f"    {names.replace(', ', ' = ')} = None\n" if names else ""
    source += "    def planted(*args, **kwargs):\n"
    source += f"        if 0: ({names},)\n" if names else ""
    source += "        raise RuntimeError('planted')\n    return planted\n"
    space: dict = {}
    exec(source, space)
    return space["outer"]().__code__


def train(folder: str) -> None:
    """What a job does: a few steps, a checkpoint, an evaluation, a profiler that is built and not used."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    loader = DataLoader(TensorDataset(torch.randn(10, 4)), batch_size=2)
    for (data,) in loader:
        scaler.scale(model(data).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        dist.barrier()
        dist.all_reduce(torch.ones(2), async_op=True).wait()
    with torch.no_grad():
        model(data)
    torch.save(model.module.state_dict(), os.path.join(folder, "model.pt"))
    torch.load(os.path.join(folder, "model.pt"))
    gc.collect(0)
    # Gloo's thread may still hold the last tensors, and takes the interpreter lock to let go of them; a process
    # group that is destroyed meanwhile waits for that thread with the lock held. torch 2.13 hangs then, with or
    # without a hook (one process of 60 such trainings in four).
    time.sleep(0.01)
    dist.destroy_process_group()


def end_recording() -> None:
    """As at the exit of the process; then as in a forked one."""
    lifetime = sys.modules["_ddpdoctor.hook.lifetime"]
    lifetime._at_exit()
    with contextlib.suppress(RuntimeError):
        lifetime.forget()


def main() -> None:
    fake_cuda.install()
    # Of Python 3.13: the code of a generator is replaced by that of a plain function.
    warnings.filterwarnings("ignore", "Assigning a code object", DeprecationWarning)
    with tempfile.TemporaryDirectory() as folder:
        train(folder)
        end_recording()
        tried = 0
        for function in functions():
            name = f"{function.__module__}.{function.__code__.co_qualname}"
            sound = function.__code__
            function.__code__ = raising(sound)
            try:
                train(folder)
                if function.__name__ != "_at_exit":
                    end_recording()
            except Exception as error:
                print(f"{name}: {error!r}", flush=True)
                if dist.is_initialized():
                    dist.destroy_process_group()
            finally:
                function.__code__ = sound
                tried += 1
            end_recording()
    print(f"tried {tried}", flush=True)


if __name__ == "__main__":
    main()
