"""Ends a trial between two steps, the same ones on all ranks, and hashes the model's parameters then."""

from __future__ import annotations

import hashlib
import math
import multiprocessing.process
import multiprocessing.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from .. import lifetime
from ..guard import part
from ..patching import Patches, around
from ..recording import Session
from . import request
from .request import Trial

_PART = part("trial")
_MOST_LOSSES = 512
"""Upper limit of the losses kept, a scalar each; the first ones."""
_WAIT_FOR_RANKS_S = 10.0
"""Seconds that a rank waits for the others to reach the same step before it ends without them."""
_POLL_S = 0.02
_created_folders: list[tuple[int, str]] = []
"""(Process id, folder) that multiprocessing created at this module's request."""


def watch_losses(patches: Patches) -> list[Any]:
    """Return a list that will receive the losses of later backwards, each copied on its own device without waiting."""
    import torch

    losses: list[Any] = []

    def before(args: Any, kwargs: Any) -> None:
        loss = args[0] if args else kwargs.get("tensors")
        if len(losses) < _MOST_LOSSES and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            losses.append(loss.detach().clone())

    patches.attribute(torch.autograd, "backward", around(torch.autograd.backward, _PART, before))
    return losses


def end(session: Session, trial: Trial, losses: list[Any]) -> NoReturn:
    """Write everything and end the process, without the script's own end."""
    try:
        request.read_again(trial)
        trial.document["parameters"] = _parameters(session)
        trial.document["losses"] = [value if math.isfinite(value) else None for value in map(float, losses)]
        trial.document["ended"] = True
        _wait_for_others(session)
    except Exception as error:
        _PART.failed(error)
    try:
        lifetime.disarm()
        sys.stdout.flush()
        sys.stderr.flush()
        _end_children()
    finally:
        os._exit(0)


def _parameters(session: Session) -> dict[str, Any]:
    """A hash of all parameters' bytes, in the order of the modules, and their norm in double precision."""
    import torch

    digest, squares, count = hashlib.sha256(), 0.0, 0
    for parameter in _all_parameters(session):
        values = parameter.detach().cpu().contiguous()
        digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
        squares += float(values.double().pow(2).sum())
        count += values.numel()
    return {"sha256": digest.hexdigest(), "norm": math.sqrt(squares), "count": count}


def _all_parameters(session: Session) -> Iterator[Any]:
    seen = set()
    modules = [reference() for reference, _ in session.models.known.listed]
    optimizers = [reference() for reference, _ in session.optimizers.listed]
    of_modules = [parameter for each in modules if each is not None for parameter in each.parameters()]
    of_optimizers = [
        parameter
        for each in optimizers
        if each is not None
        for group in getattr(each, "param_groups", [])
        for parameter in group["params"]
    ]
    for parameter in of_modules or of_optimizers:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield parameter


def _wait_for_others(session: Session) -> None:
    """Wait until all ranks have reached this step: a rank that ends while another still receives from it would break the other's
    step. The rank that holds the store leaves last."""
    if session.world_size < 2:
        return
    from torch.distributed import distributed_c10d as c10d

    store = c10d._get_default_store()
    keys = [f"ddpdoctor/trial/{rank}" for rank in range(session.world_size)]
    store.set(keys[session.rank], "ended")
    deadline_s = time.monotonic() + _WAIT_FOR_RANKS_S
    while not store.check(keys):
        if time.monotonic() > deadline_s:
            raise TimeoutError("other ranks did not reach the trial's last step")
        time.sleep(_POLL_S)
    if session.rank == 0:
        time.sleep(10 * _POLL_S)


def share_temporary_folder() -> None:
    """Make this process and its workers keep their sockets in one folder, because killed workers do not clean up."""
    try:
        known = multiprocessing.process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
        if known is None:  # otherwise it is the parent's, or chosen by the job
            _created_folders.append((os.getpid(), multiprocessing.util.get_temp_dir()))
    except Exception as error:
        _PART.failed(error)


def _end_children() -> None:
    """Kill the workers of loaders, which nothing else would end, and remove the folder if it was created here."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()
    for pid, folder in _created_folders:
        if pid == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)
