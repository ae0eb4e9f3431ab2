"""Changes settings that are constructor arguments of data loaders, DDP modules and optimizers."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable

from ..guard import part
from ..job import uses_worker_info
from ..patching import Patches, exclude_from_compile
from .request import Trial

_PART = part("trial")

LOADER = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
DDP = (
    "bucket_cap_mb",
    "gradient_as_bucket_view",
    "static_graph",
    "find_unused_parameters",
    "broadcast_buffers",
)
OPTIMIZER = ("foreach", "fused")
NAMES = (
    *(f"loader.{name}" for name in LOADER),
    *(f"ddp.{name}" for name in DDP),
    *(f"optimizer.{name}" for name in OPTIMIZER),
)

_MB = 1 << 20
_Given = dict[str, Any]
"""The arguments of a call by name, including defaults."""
_Choose = Callable[[Trial, _Given], dict[str, Any]]
"""Returns the arguments to change, with their new values."""
_ReadBack = Callable[[Any, str], Any]
"""Returns the current value of a setting of the object."""


def install(trial: Trial, patches: Patches) -> None:
    """Wrap the constructors whose arguments are to be changed."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    if any(name in trial.of("loader") for name in LOADER):
        _wrap(DataLoader, "loader", _loader_arguments, getattr, trial, patches)
    if any(name in trial.of("ddp") for name in DDP):
        _wrap(DistributedDataParallel, "ddp", _ddp_arguments, _read_ddp, trial, patches)
    if trial.of("optimizer"):
        for optimizer in vars(torch.optim).values():
            if inspect.isclass(optimizer) and issubclass(optimizer, torch.optim.Optimizer):
                if (
                    "__init__" in vars(optimizer)
                    and "foreach" in inspect.signature(optimizer.__init__).parameters
                ):
                    _wrap(optimizer, "optimizer", _optimizer_arguments, _read_optimizer, trial, patches)


def _wrap(
    owner: Any, kind: str, choose: _Choose, read_back: _ReadBack, trial: Trial, patches: Patches
) -> None:
    original = owner.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        given, changed = _changed(signature, choose, trial, (self, *args), kwargs)
        if not changed:
            original(self, *args, **kwargs)
            return
        arguments = signature.bind(self, *args, **kwargs)
        arguments.arguments.update(changed)
        original(*arguments.args, **arguments.kwargs)
        for name in changed:
            if f"{kind}.{name}" in trial.settings:
                trial.set_to(f"{kind}.{name}", given.get(name), read_back(self, name))

    exclude_from_compile(construct)
    patches.attribute(owner, "__init__", construct)


def _changed(
    signature: inspect.Signature, choose: _Choose, trial: Trial, args: Any, kwargs: Any
) -> tuple[_Given, dict[str, Any]]:
    try:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        return given, {
            name: value for name, value in choose(trial, given).items() if name in signature.parameters
        }
    except Exception as error:  # the original will refuse this call, too, with its own message
        _PART.failed(error)
        return {}, {}


def _ddp_arguments(trial: Trial, given: _Given) -> dict[str, Any]:
    return {name: value for name, value in trial.of("ddp").items() if name in DDP}


def _read_ddp(ddp: Any, name: str) -> Any:
    if name == "bucket_cap_mb":
        return ddp.bucket_bytes_cap / _MB
    return bool(getattr(ddp, name))


def _optimizer_arguments(trial: Trial, given: _Given) -> dict[str, Any]:
    asked = trial.of("optimizer")
    # torch refuses both at the same time.
    if asked.get("fused"):
        return {**asked, "foreach": asked.get("foreach")}
    if asked.get("foreach"):
        return {**asked, "fused": asked.get("fused")}
    return asked


def _read_optimizer(optimizer: Any, name: str) -> Any:
    return optimizer.defaults.get(name)


def _loader_arguments(trial: Trial, given: _Given) -> dict[str, Any]:
    """Arguments that are consistent: without workers there is nothing to prefetch and no worker to keep."""
    asked = {name: value for name, value in trial.of("loader").items() if name in LOADER}
    why = _refused_workers(asked.get("num_workers"), given)
    if why:
        trial.refuse("loader.num_workers", why)
        del asked["num_workers"]
    if asked.get("pin_memory") and not _has_accelerator():
        trial.refuse("loader.pin_memory", "there is no accelerator to copy to")
        del asked["pin_memory"]
    if not asked.get("num_workers", given.get("num_workers")):
        for name in ("prefetch_factor", "persistent_workers"):
            if asked.pop(name, None):
                trial.not_applicable(f"loader.{name}", "the loader has no workers")
        if given.get("num_workers"):
            asked.update(
                prefetch_factor=None, persistent_workers=False, timeout=0, multiprocessing_context=None
            )
    return asked


def _refused_workers(workers: int | None, given: _Given) -> str | None:
    from torch.utils.data import IterableDataset

    data = given.get("dataset")
    if workers is None or workers <= 1 or not isinstance(data, IterableDataset) or uses_worker_info(data):
        return None
    return (
        f"{type(data).__name__} is iterable and does not ask torch.utils.data.get_worker_info() for its share: "
        "each worker would give every sample again"
    )


def _has_accelerator() -> bool:
    import torch

    return bool(torch.cuda.is_available() or getattr(torch, "xpu", torch.cuda).is_available())
