"""What an event is, by its name: the one classifier. Pure functions over names, to be applied to the interned
names of a trace (see :meth:`RankTrace.name_mask`), not to its events.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.trace.categories import DEVICE_WORK
from ddpdoctor.trace.columns import RankTrace

_KNOWN = 1 << 16
"""Names whose class is remembered: the ranks of a job share nearly all of theirs."""

_LIBRARY_KERNEL = re.compile(
    r"""(?:void\s+)?(?:\w+::)*          # namespaces
    (?: nccl(?:Dev|Sym|SymDev|SymkDev)?_?Kernel   # ncclKernel_ to NCCL 2.18, Sym from 2.27
      | nccl(?:AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv)\w*Kernel   # NCCL to 2.3
      | rccl | msccl | mscclpp | oneccl | hccl | hcom_ | xccl | eccl | mccl )""",
    re.VERBOSE | re.IGNORECASE,
)
_CUSTOM_KERNEL = re.compile(
    r"cross_device_reduce|deep_ep::|nvshmem|symmetric_memory|multimem_"
    r"|(?:one|two)_?shot_?(?:all_?reduce|all_?gather|reduce_?scatter)"
    r"|quick_?(?:all_?)?reduce::|trtllm_(?:mnnvl_)?all_?reduce|allreduce_fusion_kernel|lamport_?all_?reduce"
    r"|\b(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)(?:_\w+)?_kernel",
    re.IGNORECASE,
)
"""Kernels that move data between ranks themselves: vLLM, DeepEP, NVSHMEM, torch's symmetric memory,
FlashInfer."""
_GENERATED = ("triton_", "void at::native::", "void cutlass::", "void cudnn::")
"""Compute whose name may quote a fused operation, such as triton_poi_fused_all_reduce_0."""

_ISSUED = re.compile(
    r"(?:_?c10d(?:_functional)?::|(?:nccl|gloo|mpi|ucc|xccl|hccl|rccl|cncl|mccl|eccl|fake):)", re.IGNORECASE
)
_OPERATIONS = (
    ("reducescatter", re.compile(r"reduce_?scatter", re.IGNORECASE)),
    ("allreduce", re.compile(r"all_?reduce|cross_device_reduce|quick_?reduce", re.IGNORECASE)),
    ("allgather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("alltoall", re.compile(r"all_?to_?all|deep_ep::\w+::(?:dispatch|combine)", re.IGNORECASE)),
    ("broadcast", re.compile(r"broadcast", re.IGNORECASE)),
    ("sendrecv", re.compile(r"send_?recv|(?:^|[^a-z])i?(?:send|recv)(?:[^a-z]|$|any)", re.IGNORECASE)),
    ("barrier", re.compile(r"barrier", re.IGNORECASE)),
    ("reduce", re.compile(r"(?:^|[^a-z])reduce", re.IGNORECASE)),
    ("gather", re.compile(r"(?:^|[^a-z])gather", re.IGNORECASE)),
    ("scatter", re.compile(r"(?:^|[^a-z])scatter", re.IGNORECASE)),
)
_BARE = re.compile(
    r"_?(?:i?send|i?recv(?:_?any_?source)?|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|monitored_barrier"
    r"|barrier|reduce|gather|scatter)v?(?:_base|_single|_tensor|_into_tensor|_coalesced|_sparse|_oop)*_?"
    r"(?: \d+(?:->|<-)\d+)?",
    re.IGNORECASE,
)
"""Values of the argument "Collective name"."""

_COPY = re.compile(
    r"(?:Memcpy|Copy)\s*(?P<from>H|D|P|A|M|Host|Device|Peer)\s?(?:to|To|2)\s?(?P<to>H|D|P|A|M|Host|Device|Peer)\b"
)
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


@lru_cache(_KNOWN)
def is_communication_kernel(name: str) -> bool:
    """Whether a *device* event of this name is communication between ranks.

    Annotations such as ``nccl:all_reduce`` are not: they only stand around the kernel. Ask for device events
    only.
    """
    if _ISSUED.match(name) or name.startswith(_GENERATED):
        return False
    return _LIBRARY_KERNEL.match(name) is not None or _CUSTOM_KERNEL.search(name) is not None


def is_communication_issue(name: str) -> bool:
    """Whether a host event of this name issues a collective (``c10d::allreduce_``, ``nccl:all_reduce``,
    ``gloo:...``)."""
    return communication_operation(name) is not None and _ISSUED.match(name) is not None


@lru_cache(_KNOWN)
def communication_operation(name: str) -> str | None:
    """allreduce, allgather, reducescatter, broadcast, alltoall, sendrecv, barrier, reduce, gather or scatter.

    Takes names of kernels, of issuing host events, and values of "Collective name". None where the name is no
    communication or does not say which (``ncclDevKernel_Generic``). NCCL also runs all-to-all as ``SendRecv``
    kernels: the kernel's metadata, where there is any, knows better.
    """
    if not (_ISSUED.match(name) or _BARE.fullmatch(name) or is_communication_kernel(name)):
        return None
    label = name.partition("(")[0] if "(" in name else name
    return next((operation for operation, pattern in _OPERATIONS if pattern.search(label)), None)


def is_point_to_point(name: str) -> bool:
    """Whether two ranks, and not a whole group, take part (see :func:`communication_operation` on SendRecv
    kernels)."""
    return communication_operation(name) == "sendrecv"


@lru_cache(_KNOWN)
def memcpy_kind(name: str) -> str | None:
    """HtoD, DtoH, DtoD, PtoP or HtoH of a copy on the device; None for anything else."""
    match = _COPY.search(name)
    if match is None:
        return None
    sides = [
        "H" if side[0] == "M" else "D" if side[0] == "A" else side[0] for side in (match["from"], match["to"])
    ]
    return "to".join(sides)


def memcpy_host_memory(name: str) -> str | None:
    """The host's side of a copy: "pageable" or "pinned"; None where the name does not say."""
    for kind in ("pageable", "pinned"):
        if kind in name.lower() and memcpy_kind(name) is not None:
            return kind
    return None


@lru_cache(_KNOWN)
def step_number(name: str) -> int | None:
    """12 of ``ProfilerStep#12`` (and "step 12", "Iteration 12"); None for other names."""
    match = _STEP.match(name)
    return int(match.group(1)) if match else None


def is_profiler_step(name: str) -> bool:
    """Whether torch.profiler itself marked a step by this name."""
    return name.startswith("ProfilerStep") and step_number(name) is not None


IN_PROCESS = "_SingleProcessDataLoaderIter"
"""The iterator of a DataLoader without workers, as it stands in the name of its operator."""


def is_dataloader(name: str) -> bool:
    """Whether the training thread is waiting for the next batch inside of an event of this name."""
    return (
        name.startswith("enumerate(DataLoader)")
        or "train_dataloader_next" in name
        or ("torch/utils/data/dataloader.py" in name and name.endswith(": __next__"))
    )


_SAVE = re.compile(
    r"(?:torch/serialization\.py\(\d+\): (?:save|_legacy_save)"
    r"|torch/distributed/checkpoint/state_dict_saver\.py\(\d+\): (?:save|async_save|save_state_dict)"
    r"|safetensors/torch\.py\(\d+\): save(?:_file|_model)?)$"
)


def is_save(name: str) -> bool:
    """Whether this Python frame saves a checkpoint: ``torch.save``, a distributed checkpoint's ``save``, safetensors."""
    return _SAVE.search(name) is not None


def is_collection(name: str) -> bool:
    """Whether this event among the Python frames is a garbage collection: one that the profiler was asked to record, or a call
    of ``gc.collect``."""
    return name in ("Python GC", "<built-in function collect>")


def is_optimizer_step(name: str) -> bool:
    """Whether this is the step of an optimizer (``Optimizer.step#SGD.step``)."""
    return name.startswith("Optimizer.step#")


def optimizer_steps(trace: RankTrace) -> NDArray[np.bool_]:
    """[events] the steps of optimizers on the host."""
    return trace.name_mask(is_optimizer_step) & trace.category_mask("user_annotation", "cpu_op")


def is_zero_grad(name: str) -> bool:
    """Whether this clears the gradients (``Optimizer.zero_grad#SGD.zero_grad``)."""
    return name.startswith("Optimizer.zero_grad#")


@lru_cache(_KNOWN)
def is_sync_call(name: str) -> bool:
    """Whether a runtime call of this name makes the host wait for the device (CUDA, HIP, MUSA, CANN, Level
    Zero, MTIA)."""
    return _SYNC.match(name) is not None


def is_ddp_forward(name: str) -> bool:
    """Whether this is the forward of a ``DistributedDataParallel`` module."""
    return name == "DistributedDataParallel.forward" or (
        "torch/nn/parallel/distributed.py" in name and name.endswith(": forward")
    )


def is_gloo(name: str) -> bool:
    """Whether this is gloo's own event of a collective, on one of its threads: it begins when a thread takes
    it up."""
    return name.startswith("gloo:")


def communication_kernels(trace: RankTrace) -> NDArray[np.bool_]:
    """Which events of ``trace`` are communication kernels, shape (size,)."""
    return device_work(trace) & trace.name_mask(is_communication_kernel)


def device_work(trace: RankTrace) -> NDArray[np.bool_]:
    """Which events of ``trace`` keep an accelerator busy: kernels, copies and fills, not annotations, shape
    (size,)."""
    return trace.category_mask(*DEVICE_WORK)


def next_batches(trace: RankTrace) -> NDArray[np.bool_]:
    """[events] the training thread's waits for the next batch."""
    return trace.name_mask(is_dataloader) & trace.category_mask("user_annotation", "cpu_op")
