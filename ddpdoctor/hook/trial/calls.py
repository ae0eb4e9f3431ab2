"""Changes settings that are not constructor arguments: DDP's communication hook and accumulation, autocast, barriers, and a data
loader that repeats its batches."""

from __future__ import annotations

import functools
from typing import Any, Callable
from weakref import WeakKeyDictionary

from ..guard import part
from ..patching import Patches, around, cell_of, exclude_from_compile
from ..recording import active
from .request import Trial

_PART = part("trial")

NAMES = (
    "ddp.comm_hook",
    "ddp.no_sync",
    "ddp.accumulate",
    "amp.autocast",
    "loader.instant",
    "sync.barriers",
)
_BATCHES_KEPT = 8
"""Number of batches that a loader repeats; too many for the CPU caches to hold them all."""
_OBSERVED_STEPS = 3
"""Optimizer steps after which the number of backwards per step is known."""


def install(trial: Trial, patches: Patches) -> None:
    """Wrap only what the requested settings need."""
    from torch.nn.parallel import DistributedDataParallel as Ddp

    asked = trial.settings
    if "ddp.comm_hook" in asked:
        hook = _comm_hook(trial, str(asked["ddp.comm_hook"]))
        patches.attribute(Ddp, "_pre_forward", around(Ddp._pre_forward, _PART, hook))
    if asked.get("ddp.no_sync"):
        patches.attribute(Ddp, "_pre_forward", around(Ddp._pre_forward, _PART, _never_reduces(trial)))
    if asked.get("ddp.accumulate"):
        patches.attribute(
            Ddp, "_pre_forward", around(Ddp._pre_forward, _PART, _Accumulation(trial).before_forward)
        )
    if "amp.autocast" in asked:
        patches.attribute(Ddp, "_run_ddp_forward", _in_autocast(trial, Ddp._run_ddp_forward))
    if asked.get("loader.instant"):
        _make_instant(trial, patches)
    if asked.get("sync.barriers") == "skip":
        _skip_barriers(trial, patches)


def _comm_hook(trial: Trial, kind: str) -> Callable[[Any, Any], None]:
    """Return a function that registers the hook at the first forward. By then the script has registered its own, if it has one."""
    seen: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    def before_forward(args: Any, kwargs: Any) -> None:
        ddp = args[0]
        if ddp in seen:
            return
        seen[ddp] = True
        if getattr(ddp, "_comm_hooks", None) or ddp.logger._get_ddp_logging_data().strs_map.get("comm_hook"):
            trial.refuse("ddp.comm_hook", "the script registers a hook of its own")
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        try:
            ddp.register_comm_hook(None, hooks[kind])
        except Exception as error:  # bf16 needs a GPU
            trial.refuse("ddp.comm_hook", f"{type(error).__name__}: {error}")
            return
        trial.set_to("ddp.comm_hook", None, kind)

    return before_forward


def _never_reduces(trial: Trial) -> Callable[[Any, Any], None]:
    def before_forward(args: Any, kwargs: Any) -> None:
        ddp = args[0]
        was = ddp.require_backward_grad_sync
        ddp.require_backward_grad_sync = False
        trial.set_to("ddp.no_sync", not was, not ddp.require_backward_grad_sync)

    return before_forward


class _Accumulation:
    """Reduces gradients only in the last backward before an optimizer step; the earlier ones accumulate."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._steps, self._forwards = -1, 0
        self._forwards_per_step: list[int] = []

    def before_forward(self, args: Any, kwargs: Any) -> None:
        """Called in each forward of a DDP module. Assumes that there is only one."""
        ddp, session = args[0], active.session
        import torch

        if session is None or not torch.is_grad_enabled():
            return
        steps = session.stepping.optimizer_steps
        if steps != self._steps:
            if self._steps >= 0:
                self._forwards_per_step.append(self._forwards)
            self._steps, self._forwards = steps, 0
        self._forwards += 1
        if len(self._forwards_per_step) < _OBSERVED_STEPS:
            return
        usual = self._forwards_per_step[1:_OBSERVED_STEPS]
        if min(usual) != max(usual):
            self._trial.refuse("ddp.accumulate", "the number of backwards changes from step to step")
            return
        if usual[0] < 2:
            self._trial.refuse("ddp.accumulate", "each optimizer step has one backward")
            return
        if self._forwards == 1:
            self._trial.set_to("ddp.accumulate", not ddp.require_backward_grad_sync, True)
        ddp.require_backward_grad_sync = self._forwards >= usual[0]


_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def _in_autocast(trial: Trial, original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    kind = str(trial.settings["amp.autocast"])

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = next((each.device.type for each in self.module.parameters()), "cpu")
        was = torch.is_autocast_cpu_enabled() if device == "cpu" else torch.is_autocast_enabled()
        if was:
            trial.refuse("amp.autocast", "the script uses autocast already")
            return original(self, *args, **kwargs)
        with torch.autocast(device, getattr(torch, _DTYPES[kind])):
            trial.set_to("amp.autocast", None, kind)
            return original(self, *args, **kwargs)

    exclude_from_compile(forward)
    return forward


def _make_instant(trial: Trial, patches: Patches) -> None:
    """Make loaders repeat batches that were prepared once: the lower bound of a loader's cost."""
    from torch.utils.data import dataloader

    iterator = dataloader._BaseDataLoaderIter
    original = iterator.__next__
    kept: dict[int, list[Any]] = {}

    @functools.wraps(original)
    def following(self: Any) -> Any:
        length = _batches_of(self)
        if length is None:
            trial.not_applicable("loader.instant", "the loader does not know its number of batches")
            return original(self)
        batches = kept.setdefault(_loader_id(self), [])
        if len(batches) < _BATCHES_KEPT:
            batches.append(original(self))
            return batches[-1]
        # torch sets it to 0 when a loop begins, also if the iterator is that of the loop before.
        number = self._num_yielded
        if number >= length:
            raise StopIteration
        self._num_yielded = number + 1
        trial.set_to("loader.instant", False, True)
        return batches[number % _BATCHES_KEPT]

    patches.attribute(iterator, "__next__", following)


def _loader_id(iterator: Any) -> int:
    """An id that all iterators of one loader share, epoch after epoch: that of its sampler."""
    return id(getattr(iterator, "_index_sampler", iterator))


def _batches_of(iterator: Any) -> int | None:
    try:
        return len(iterator._index_sampler)
    except (AttributeError, TypeError, NotImplementedError):
        return None


def _skip_barriers(trial: Trial, patches: Patches) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    cell = cell_of(c10d.barrier)
    original: Callable[..., Any] = c10d.barrier if cell is None else cell.cell_contents

    @functools.wraps(original)
    def barrier(*args: Any, **kwargs: Any) -> Any:
        if active.session is None:  # a framework may need barriers before its first step
            return original(*args, **kwargs)
        trial.set_to("sync.barriers", "kept", "skip")
        return None

    if cell is not None:
        patches.cell(cell, barrier)
        return
    for module in (dist, c10d):
        patches.attribute(module, "barrier", barrier)
