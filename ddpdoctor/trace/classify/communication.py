"""Communication between ranks: which events are it, and which operation their names say."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.trace.columns import KNOWN_NAMES, RankTrace

from .device import device_work

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
"""Kernels that move data between ranks themselves: vLLM, DeepEP, NVSHMEM, torch's symmetric memory, FlashInfer."""
_GENERATED = ("triton_", "void at::native::", "void cutlass::", "void cudnn::")
"""Compute whose name may quote a fused operation, such as triton_poi_fused_all_reduce_0."""
_ISSUED = re.compile(
    r"(?:_?c10d(?:_functional)?::|(?:nccl|gloo|mpi|ucc|xccl|hccl|rccl|cncl|mccl|eccl|fake):)", re.IGNORECASE
)
"""Begins of the host's events that issue a collective."""
_BARE = re.compile(r"\w+(?: \d+(?:->|<-)\d+)?|DDP (?:gradients|buffers)")
"""A name that stands by itself: a value of the argument "Collective name", a function of ``torch.distributed``, or one
of DDP's own collectives as step logs call them."""
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
"""The first that fits: a reduce-scatter's name holds that of a reduce and of a scatter."""


@lru_cache(KNOWN_NAMES)
def is_communication_kernel(name: str) -> bool:
    """Whether a *device* event of this name is communication between ranks.

    Ask for device events only: annotations such as ``nccl:all_reduce`` are none, they only stand around the kernel.
    """
    if _ISSUED.match(name) or name.startswith(_GENERATED):
        return False
    return _LIBRARY_KERNEL.match(name) is not None or _CUSTOM_KERNEL.search(name) is not None


@lru_cache(KNOWN_NAMES)
def communication_operation(name: str) -> str | None:
    """The operation that ``name`` says, however it is spelled.

    ``all_reduce``, ``c10d::allreduce_`` and ``ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)`` are "allreduce". One of
    allreduce, allgather, reducescatter, broadcast, alltoall, sendrecv, barrier, reduce, gather, scatter.

    Takes names of communication kernels, of events that issue a collective, of ``torch.distributed``'s functions, of DDP's
    own collectives in step logs, and values of the argument "Collective name". None where the name does not say which
    (``ncclDevKernel_Generic``) or is no such name (``aten::gather``). NCCL also runs all-to-all as ``SendRecv`` kernels:
    the kernel's metadata, where there is any, knows better.
    """
    if not (_ISSUED.match(name) or _BARE.fullmatch(name) or is_communication_kernel(name)):
        return None
    label = name.partition("(")[0] if "(" in name else name
    return next((operation for operation, pattern in _OPERATIONS if pattern.search(label)), None)


def is_gloo(name: str) -> bool:
    """Whether this is gloo's own event of a collective: it begins when one of gloo's threads takes it up."""
    return name.startswith("gloo:")


def communication_kernels(trace: RankTrace) -> NDArray[np.bool_]:
    """[events] the communication kernels."""
    return device_work(trace) & trace.name_mask(is_communication_kernel)
