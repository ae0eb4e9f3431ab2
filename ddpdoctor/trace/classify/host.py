"""What the host did: steps, batches, the optimizer, waits for the device, checkpoints, garbage collections."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.trace.columns import KNOWN_NAMES, RankTrace

IN_PROCESS = "_SingleProcessDataLoaderIter"
"""The iterator of a DataLoader without workers, as it stands in the name of its operator."""
_STEP = re.compile(
    r"(?:##\s*)?(?:Profiler\s?Step|(?:train(?:ing)?_?)?step|iteration)\s*+[#*:=_ ]?\s*+(\d{1,9})(?:\s*+##)?$",
    re.IGNORECASE,
)
_SYNC = re.compile(
    r"(?:cu|cuda|hip|musa|cn|mtia|synap|ze|ur)(?:Device|Stream|Event|Ctx|Queue|CommandQueue)(?:Host)?Synchronize"
    r"(?:WithFlag|WithTimeout)?(?:_ptsz)?$"
    r"|(?:aclrt)?[sS]ynchronize(?:Stream|Device|Event)?(?:WithTimeout)?$"
    r"|(?:ze|ur)\w*(?:HostSynchronize|QueueFinish|EventWait)$"
)
_SAVE = re.compile(
    r"(?:torch/serialization\.py\(\d+\): (?:save|_legacy_save)"
    r"|torch/distributed/checkpoint/state_dict_saver\.py\(\d+\): (?:save|async_save|save_state_dict)"
    r"|safetensors/torch\.py\(\d+\): save(?:_file|_model)?)$"
)


@lru_cache(KNOWN_NAMES)
def step_number(name: str) -> int | None:
    """12 of ``ProfilerStep#12`` (and "step 12", "Iteration 12"); None for other names."""
    match = _STEP.match(name)
    return int(match.group(1)) if match else None


def is_dataloader(name: str) -> bool:
    """Whether the training thread is waiting for the next batch inside of an event of this name."""
    return (
        name.startswith("enumerate(DataLoader)")
        or "train_dataloader_next" in name
        or ("torch/utils/data/dataloader.py" in name and name.endswith(": __next__"))
    )


def is_save(name: str) -> bool:
    """Whether this Python frame saves a checkpoint: ``torch.save``, a distributed checkpoint's ``save``, safetensors."""
    return _SAVE.search(name) is not None


def is_collection(name: str) -> bool:
    """Whether this event among the Python frames is a garbage collection.

    Either one that the profiler was asked to record, or a call of ``gc.collect``.
    """
    return name in ("Python GC", "<built-in function collect>")


def is_optimizer_step(name: str) -> bool:
    """Whether this is the step of an optimizer (``Optimizer.step#SGD.step``)."""
    return name.startswith("Optimizer.step#")


def optimizer_steps(trace: RankTrace) -> NDArray[np.bool_]:
    """[events] the steps of optimizers on the host."""
    return trace.name_mask(is_optimizer_step) & trace.category_mask("user_annotation", "cpu_op")


@lru_cache(KNOWN_NAMES)
def is_sync_call(name: str) -> bool:
    """Whether a runtime call of this name makes the host wait for the device (CUDA, HIP, MUSA, CANN, Level Zero, MTIA)."""
    return _SYNC.match(name) is not None


def is_ddp_forward(name: str) -> bool:
    """Whether this is the forward of a ``DistributedDataParallel`` module."""
    return name == "DistributedDataParallel.forward" or (
        "torch/nn/parallel/distributed.py" in name and name.endswith(": forward")
    )


def next_batches(trace: RankTrace) -> NDArray[np.bool_]:
    """[events] the training thread's waits for the next batch."""
    return trace.name_mask(is_dataloader) & trace.category_mask("user_annotation", "cpu_op")
