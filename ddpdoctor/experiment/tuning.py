"""What to walk through where nobody knows the best value: workers of loaders, sizes of buckets."""

from __future__ import annotations

import os

from .proposals import Proposal

_WORKERS = (1, 2, 4, 8, 16)
_LEAST_WALKED = 4
"""Workers that only wait, as for storage, need no core."""
_PREFETCH = (2, 4)
_BUCKETS_MB = (1.0, 5.0, 25.0, 100.0)
TUNED = ("loader", "ddp")


def tuning(kind: str, ranks_here: int) -> list[Proposal]:
    """The variants of ``--tune loader`` or ``ddp``. Ranks of this host share its cores: more workers than are left for a rank take
    turns with its training."""
    if kind == "ddp":
        return [Proposal({"ddp.bucket_cap_mb": size}) for size in _BUCKETS_MB]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(_LEAST_WALKED, 2 * cores // max(ranks_here, 1))
    return [
        Proposal(
            {
                "loader.num_workers": workers,
                "loader.prefetch_factor": prefetch,
                "loader.persistent_workers": True,
            }
        )
        for workers in _WORKERS
        if workers <= most
        for prefetch in _PREFETCH
    ]
