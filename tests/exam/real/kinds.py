"""The kinds of fault that a program may get, and which rules name them rightly by the meaning of their pages.

``rules`` may name the fault; where the batches are made without a DataLoader, no loader is there to be named.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of fault: who has it, where it may stand, what it is made of, and what it may be called."""

    one_rank: bool
    sites: tuple[str, ...]
    snippets: tuple[str, ...]
    rules: tuple[str, ...]
    rules_without_loader: tuple[str, ...] = ()
    weight: int = 2
    tolerated: tuple[str, ...] = ()


HOST = ("rank-imbalance/host-work",)
PYTHON = ("host/python-work",)
BETWEEN = (*PYTHON, "host/outside-work")
"""Of operators between the phases on all ranks, that no training step needs there."""
OUTSIDE = ("before", "after")
HEAVY = ("allreduce/communication-bound", "allreduce/not-overlapped", "allreduce/slow-transfer")
KINDS = {
    "data-one": Kind(True, ("item", "collate"), ("sleep", "loop"), ("dataloader/one-rank-late",), HOST, 3),
    "data-all": Kind(False, ("item", "collate"), ("sleep", "loop"), ("dataloader/starved",), PYTHON, 2),
    "host-one": Kind(True, OUTSIDE, ("loop", "dumps"), HOST, weight=4),
    "host-all": Kind(False, OUTSIDE, ("loop", "dumps"), PYTHON, weight=2),
    "wait-one": Kind(True, OUTSIDE, ("sleep",), HOST, weight=3),
    "wait-all": Kind(False, OUTSIDE, ("sleep",), PYTHON, weight=1),
    "gap-compute-one": Kind(True, OUTSIDE, ("products",), HOST, weight=3),
    "gap-compute-all": Kind(False, OUTSIDE, ("products",), BETWEEN, weight=1),
    "forward-one": Kind(True, ("forward",), ("products", "loop"), ("rank-imbalance/slow-compute",), weight=3),
    "uneven": Kind(True, (), (), ("rank-imbalance/uneven-work",), weight=2),
    "checkpoint": Kind(True, ("after",), ("bytes",), ("sync/checkpoint",), weight=1),
    "rare": Kind(
        True, OUTSIDE, ("sleep", "loop", "products"), ("rank-imbalance/intermittent", *HOST), weight=2
    ),
    "collection-one": Kind(True, OUTSIDE, ("collect",), ("rank-imbalance/garbage-collection",), weight=1),
    "collection-all": Kind(False, OUTSIDE, ("collect",), ("rank-imbalance/garbage-collection",), weight=1),
    "barrier": Kind(
        False, ("middle",), ("barrier",), ("sync/explicit-barrier",), weight=1, tolerated=(*HOST, *PYTHON)
    ),
    "reductions": Kind(False, OUTSIDE, ("reductions",), ("sync/blocking-collective",), weight=2),
    "contended": Kind(
        True, (), (), ("rank-imbalance/starved-rank",), weight=1, tolerated=("host/cpu-starved",)
    ),
    "buckets": Kind(False, (), (), ("allreduce/small-buckets",), weight=1, tolerated=HEAVY),
    "resync": Kind(False, (), (), ("allreduce/redundant-sync",), weight=1, tolerated=HEAVY),
}
WITH_ANOTHER = (
    "data-one",
    "host-one",
    "host-all",
    "wait-one",
    "gap-compute-one",
    "forward-one",
    "reductions",
    "checkpoint",
)
"""Kinds that may stand in a program together."""
