"""Classifies events by name and category: collectives, copies, steps, waits for the next batch, host-device synchronization.

Covers the names that profilers of torch 1.8 and newer and the vendors' libraries write. Functions of a name are pure and are
applied to the interned names of a trace (:meth:`RankTrace.name_mask`), not to each event. Functions of a trace return a
mask of its events.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.trace.columns import KNOWN_NAMES, RankTrace

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
"""Kernels that move data between ranks without a collective library: vLLM, DeepEP, NVSHMEM, torch's symmetric memory, FlashInfer."""
_GENERATED = ("triton_", "void at::native::", "void cutlass::", "void cudnn::")
"""Prefixes of compute kernels. Their names may contain that of a collective, such as triton_poi_fused_all_reduce_0."""
_ISSUED = re.compile(
    r"(?:_?c10d(?:_functional)?::|(?:nccl|gloo|mpi|ucc|xccl|hccl|rccl|cncl|mccl|eccl|fake):)", re.IGNORECASE
)
"""Prefixes of host events that launch a collective."""
_BARE = re.compile(r"\w+(?: \d+(?:->|<-)\d+)?|DDP (?:gradients|buffers)")
"""A bare operation name: a value of the argument "Collective name", a function of ``torch.distributed``, or a step log's name for a
collective of DDP."""
_OPERATIONS = (
    ("reducescatter", re.compile(r"reduce_?scatter", re.IGNORECASE)),
    ("allreduce", re.compile(r"all_?reduce|cross_device_reduce|quick_?reduce|^DDP gradients", re.IGNORECASE)),
    ("allgather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("alltoall", re.compile(r"all_?to_?all|deep_ep::\w+::(?:dispatch|combine)", re.IGNORECASE)),
    ("broadcast", re.compile(r"broadcast|^DDP buffers", re.IGNORECASE)),
    ("sendrecv", re.compile(r"send_?recv|(?:^|[^a-z])i?(?:send|recv)(?:[^a-z]|$|any)", re.IGNORECASE)),
    ("barrier", re.compile(r"barrier", re.IGNORECASE)),
    ("reduce", re.compile(r"(?:^|[^a-z])reduce", re.IGNORECASE)),
    ("gather", re.compile(r"(?:^|[^a-z])gather", re.IGNORECASE)),
    ("scatter", re.compile(r"(?:^|[^a-z])scatter", re.IGNORECASE)),
)
"""The first match is used: "reduce_scatter" also contains "reduce" and "scatter"."""


def is_communication_kernel(name: str) -> bool:
    """Whether a *device* event of this name is communication between ranks.

    False for annotations such as ``nccl:all_reduce``, which only enclose the kernel.
    """
    if _ISSUED.match(name) or name.startswith(_GENERATED):
        return False
    return _LIBRARY_KERNEL.match(name) is not None or _CUSTOM_KERNEL.search(name) is not None


@lru_cache(KNOWN_NAMES)
def communication_operation(name: str) -> str | None:
    """The collective operation in ``name``, in a uniform spelling.

    ``all_reduce``, ``c10d::allreduce_`` and ``ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)`` give "allreduce". One of
    allreduce, allgather, reducescatter, broadcast, alltoall, sendrecv, barrier, reduce, gather, scatter.

    Accepts names of communication kernels, of host events that launch a collective, of ``torch.distributed`` functions, of
    DDP's collectives in step logs, and values of the argument "Collective name". None if the name does not state the
    operation (``ncclDevKernel_Generic``) or is none of these (``aten::gather``). NCCL also runs all-to-all as ``SendRecv``
    kernels, so prefer the kernel's metadata if the trace has it.
    """
    if not (_ISSUED.match(name) or _BARE.fullmatch(name) or is_communication_kernel(name)):
        return None
    label = name.partition("(")[0] if "(" in name else name
    return next((operation for operation, pattern in _OPERATIONS if pattern.search(label)), None)


def is_gloo(name: str) -> bool:
    """Whether this is gloo's event of a collective, which begins when a gloo thread starts the collective."""
    return name.startswith("gloo:")


def communication_kernels(trace: RankTrace) -> NDArray[np.bool_]:
    """[events] the communication kernels, by their names or by the collective metadata in the trace, which covers kernels with unknown
    names."""
    described = np.zeros(trace.name.size, bool)
    described[trace.collectives.event] = True
    return (
        device_work(trace) & trace.name_mask(is_communication_kernel)
        | trace.category_mask("kernel") & described
    )


DEVICE_WORK = frozenset(
    {
        "kernel",
        "gpu_memcpy",
        "gpu_memset",
        "mtia_ccp_events",
        "mtia_kernel",
        "glow_runtime_device",
        "hpu_op",
        "npu_kernel",
        "collective_comm",
    }
)
"""Categories of work on an accelerator."""

DEVICE = DEVICE_WORK | {"gpu_user_annotation", "cuda_sync", "mtia_workloadd", "mtia_insight"}
"""Categories of all events that are shown on a device's streams."""

_COPY = re.compile(
    r"(?:Memcpy|Copy)\s*(?P<from>H|D|P|A|M|Host|Device|Peer)\s?(?:to|To|2)\s?(?P<to>H|D|P|A|M|Host|Device|Peer)\b"
)
_OPTIMIZER = re.compile(r"multi_tensor_apply(?!.*Copy)|kOptimizer\d")
"""Multi-tensor kernels of optimizers: torch's foreach and fused ones, Apex, DeepSpeed and bitsandbytes. Multi-tensor copies
are excluded: FSDP gathers parameters with them."""
_SIDES = {"M": "H", "A": "D"}
"""Other letters for host (H) and device (D): XPU's M2D copies from host memory, CUPTI's HtoA copies to an array on the device."""


def device_work(trace: RankTrace) -> NDArray[np.bool_]:
    """[events] kernels, copies and fills on an accelerator, without annotations."""
    return trace.category_mask(*DEVICE_WORK)


def memcpy_kind(name: str) -> str | None:
    """Direction of a copy on the device: HtoD, DtoH, DtoD, PtoP or HtoH; None for other events."""
    match = _COPY.search(name)
    if match is None:
        return None
    return "to".join(_SIDES.get(side[0], side[0]) for side in (match["from"], match["to"]))


def is_optimizer_kernel(name: str) -> bool:
    """Whether this is a multi-tensor kernel. Optimizers, gradient clipping and ``zero_grad`` launch them."""
    return _OPTIMIZER.search(name) is not None


IN_PROCESS = "_SingleProcessDataLoaderIter"
"""Iterator class of a DataLoader without workers, as it appears in event names."""
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
    """12 for ``ProfilerStep#12`` (also "step 12", "Iteration 12"); None for other names."""
    match = _STEP.match(name)
    return int(match.group(1)) if match else None


def is_dataloader(name: str) -> bool:
    """Whether the training thread waits for the next batch during an event of this name."""
    return (
        name.startswith("enumerate(DataLoader)")
        or "train_dataloader_next" in name
        or ("torch/utils/data/dataloader.py" in name and name.endswith(": __next__"))
    )


def is_save(name: str) -> bool:
    """Whether this Python frame saves a checkpoint: ``torch.save``, a distributed checkpoint's ``save``, safetensors."""
    return _SAVE.search(name) is not None


def is_garbage_collection(name: str) -> bool:
    """Whether this Python frame is a garbage collection: an automatic one (``Python GC``) or a call of ``gc.collect``."""
    return name in ("Python GC", "<built-in function collect>")


def is_optimizer_step(name: str) -> bool:
    """Whether this is the step of an optimizer (``Optimizer.step#SGD.step``)."""
    return name.startswith("Optimizer.step#")


def optimizer_steps(trace: RankTrace) -> NDArray[np.bool_]:
    """[events] the steps of optimizers on the host."""
    return trace.name_mask(is_optimizer_step) & trace.category_mask("user_annotation", "cpu_op")


def is_sync_call(name: str) -> bool:
    """Whether a runtime call of this name makes the host wait for the device (CUDA, HIP, MUSA, CANN, Level Zero, MTIA)."""
    return _SYNC.match(name) is not None


def is_ddp_forward(name: str) -> bool:
    """Whether this is the forward pass of a ``DistributedDataParallel`` module."""
    return name == "DistributedDataParallel.forward" or (
        "torch/nn/parallel/distributed.py" in name and name.endswith(": forward")
    )


def next_batches(trace: RankTrace) -> NDArray[np.bool_]:
    """[events] waits of the training thread for the next batch."""
    return trace.name_mask(is_dataloader) & trace.category_mask("user_annotation", "cpu_op")
