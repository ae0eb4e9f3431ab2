"""A two-rank training job with a planted fault, for ``ddpdoctor demo``: the faults and the expected diagnoses. ``job.py`` is the script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.errors import DdpDoctorError

JOB = Path(__file__).with_name("job.py")
"""The training script; it does not use ddpdoctor."""


@dataclass(frozen=True)
class Fault:
    """One fault of ``job.py``."""

    name: str
    description: str
    """One sentence on the mistake in the script."""
    expected_rule: str | None
    """Id of the expected main finding's rule; None if the job is healthy."""
    ranks: tuple[int, ...] | None = None
    """Ranks that have the fault; None for all."""
    hangs: bool = False
    """Whether the job hangs and must be killed."""


FAULTS = (
    Fault("healthy", "Nothing is wrong.", None),
    Fault("slow-data", "Every rank decodes its images in the training process.", "dataloader/starved"),
    Fault("slow-data-one-rank", "Rank 1 reads its images from slow storage.", "dataloader/one-rank-late", (1,)),
    Fault("slow-compute-one-rank", "Rank 1 repeats part of its forward pass.", "rank-imbalance/slow-compute", (1,)),
    Fault("rank0-host-work", "Rank 0 computes statistics in Python in every step.", "rank-imbalance/host-work", (0,)),
    Fault("barrier", "A barrier in every step keeps uneven work from evening out.", "sync/explicit-barrier"),
    Fault("tiny-buckets", "DDP reduces gradients in tiny buckets.", "allreduce/small-buckets"),
    Fault("no-no-sync", "Gradients are accumulated over 8 batches without no_sync().", "allreduce/redundant-sync"),
    Fault("communication-bound", "The model is too big for the link.", "allreduce/communication-bound"),
    Fault("metrics-allreduce", "13 metrics are averaged one by one in every step.", "sync/blocking-collective"),
    Fault("checkpoint", "Rank 0 saves a checkpoint every 5 steps.", "sync/checkpoint", (0,)),
    Fault("uneven-batch", "Rank 1 gets twice the batch.", "rank-imbalance/uneven-work", (1,)),
    Fault("gc", "Rank 1 collects garbage every other step.", "rank-imbalance/garbage-collection", (1,)),
    Fault("hang", "Rank 1 acquires a lock in step 60 that it holds already (a deadlock).", "hang/not-reached", (1,), hangs=True),
    Fault("intermittent", "Rank 1 is slow in every tenth step.", "rank-imbalance/intermittent", (1,)),
)  # fmt: skip


def find_fault(name: str) -> Fault:
    """The fault named ``name``. Raises DdpDoctorError that lists all names."""
    for fault in FAULTS:
        if fault.name == name:
            return fault
    raise DdpDoctorError(
        f"there is no fault called {name}; there are {', '.join(fault.name for fault in FAULTS)}."
    )
