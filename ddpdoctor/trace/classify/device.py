"""What an accelerator did: kernels, copies and fills, and which way a copy went."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.trace.columns import KNOWN_NAMES, RankTrace

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
"""Work that an accelerator did."""

DEVICE = DEVICE_WORK | {"gpu_user_annotation", "cuda_sync", "mtia_workloadd", "mtia_insight"}
"""Everything that stands on a device's lane."""

_COPY = re.compile(
    r"(?:Memcpy|Copy)\s*(?P<from>H|D|P|A|M|Host|Device|Peer)\s?(?:to|To|2)\s?(?P<to>H|D|P|A|M|Host|Device|Peer)\b"
)
_OPTIMIZER = re.compile(r"multi_tensor_apply(?!.*Copy)|kOptimizer\d")
"""Kernels of optimizers that work on whole lists of tensors: torch's foreach and fused ones, Apex's and DeepSpeed's, and those of
bitsandbytes. Sharded parameters are gathered by copies of lists."""
_SIDES = {"M": "H", "A": "D"}
"""Other letters for the host and the device: XPU's M2D comes from the host's memory, CUPTI's HtoA goes to an array on the device."""


def device_work(trace: RankTrace) -> NDArray[np.bool_]:
    """[events] what keeps an accelerator busy: kernels, copies and fills, not annotations."""
    return trace.category_mask(*DEVICE_WORK)


@lru_cache(KNOWN_NAMES)
def memcpy_kind(name: str) -> str | None:
    """HtoD, DtoH, DtoD, PtoP or HtoH of a copy on the device; None for anything else."""
    match = _COPY.search(name)
    if match is None:
        return None
    return "to".join(_SIDES.get(side[0], side[0]) for side in (match["from"], match["to"]))


@lru_cache(KNOWN_NAMES)
def is_optimizer_kernel(name: str) -> bool:
    """Whether a kernel of this name works on whole lists of tensors, as optimizers do, and what clips and zeroes gradients."""
    return _OPTIMIZER.search(name) is not None
