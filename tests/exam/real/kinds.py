"""The kinds of faults of a program, and the rules that are right for them by their pages.

If batches are made without a DataLoader, ``rules_without_loader`` are right instead of ``rules``. The author of the kinds of weight 0
and of the traps knew the analysis, so no seed draws them; ``--each`` runs them by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

Shape = Mapping[str, object]
"""Properties of a program, by their names in ``draw``."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """Properties of a program that are not drawn."""

    kind: str = ""
    """Its only fault; empty for a healthy program."""
    shape: Shape = dataclasses.field(default_factory=dict)
    places: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Texts by placeholder, see ``texts``."""
    world: int = 2
    spawned: bool = False
    """Whether the ranks are started by spawn instead of torchrun."""
    noted: bool = False
    """Whether the job itself records in which steps it does the planted work, and for how long."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of fault: who has it, its possible places, its code, and the right rules."""

    one_rank: bool
    sites: tuple[str, ...]
    snippets: tuple[str, ...]
    rules: tuple[str, ...]
    rules_without_loader: tuple[str, ...] = ()
    weight: int = 2
    tolerated: tuple[str, ...] = ()
    shape: Shape = dataclasses.field(default_factory=dict)
    """Properties of each program with this fault."""
    when: str = ""
    """ "by chance" (random steps) or "in turn" (rotates among ranks); empty: in every n-th step."""
    steady: bool = True
    """Whether the fault is in every step."""
    priced: bool = True
    """Whether the program without the fault is otherwise the same, so that the price is known."""


HOST = ("rank-imbalance/host-work",)
PYTHON = ("host/python-work",)
BETWEEN = (*PYTHON, "host/outside-work")
"""Rules for operators between the phases on all ranks."""
OUTSIDE = ("before", "after")
COMPUTE = ("rank-imbalance/slow-compute",)
WORKER: Shape = {"data": "map", "workers": 1}
BY_HAND: Shape = {"by_hand": True, "parts": 1, "optimizers": 1}
"""A program without DDP, which averages gradients parameter by parameter."""
AVERAGED = ("sync/blocking-collective",)
EPOCH_STEPS = 4
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
    "checkpoint": Kind(True, ("after",), ("bytes",), ("sync/checkpoint",), weight=1, steady=False),
    "rare": Kind(
        True,
        OUTSIDE,
        ("sleep", "loop", "products"),
        ("rank-imbalance/intermittent", *HOST),
        weight=2,
        steady=False,
    ),
    "collection-one": Kind(
        True, OUTSIDE, ("collect",), ("rank-imbalance/garbage-collection",), weight=1, steady=False
    ),
    "collection-all": Kind(
        False, OUTSIDE, ("collect",), ("rank-imbalance/garbage-collection",), weight=1, steady=False
    ),
    "barrier": Kind(
        False, ("middle",), ("barrier",), ("sync/explicit-barrier",), weight=1, tolerated=(*HOST, *PYTHON)
    ),
    "reductions": Kind(False, OUTSIDE, ("reductions",), ("sync/blocking-collective",), weight=2),
    "contended": Kind(
        True, (), (), ("rank-imbalance/starved-rank",), weight=1, tolerated=("host/cpu-starved",)
    ),
    "buckets": Kind(False, (), (), ("allreduce/small-buckets",), weight=1, tolerated=HEAVY),
    "resync": Kind(False, (), (), ("allreduce/redundant-sync",), weight=1, tolerated=HEAVY),
    "worker-one": Kind(
        True, ("item", "collate"), ("sleep",), ("dataloader/one-rank-late",), weight=0, shape=WORKER
    ),
    "worker-all": Kind(
        False, ("item", "collate"), ("sleep",), ("dataloader/starved",), weight=0, shape=WORKER
    ),
    "worker-start": Kind(
        False,
        (),
        (),
        ("dataloader/worker-restart",),
        weight=0,
        shape={**WORKER, "structure": "nested", "epochs": f"steps // {EPOCH_STEPS}"},
        steady=False,
    ),
    "generator-one": Kind(
        True,
        ("collate",),
        ("sleep", "loop"),
        (),
        HOST,
        weight=0,
        tolerated=AVERAGED,
        shape={"data": "own", **BY_HAND},
    ),
    "generator-all": Kind(
        False,
        ("collate",),
        ("sleep", "loop"),
        (),
        PYTHON,
        weight=0,
        tolerated=AVERAGED,
        shape={"data": "own", **BY_HAND},
    ),
    "forward-by-hand": Kind(
        True,
        ("forward",),
        ("sleep", "loop"),
        (*COMPUTE, *HOST),
        weight=0,
        tolerated=AVERAGED,
        shape=BY_HAND,
    ),
    "before-average": Kind(
        True, ("ready",), ("sleep", "loop"), HOST, weight=0, tolerated=AVERAGED, shape=BY_HAND
    ),
    "after-backward": Kind(True, ("ready",), ("sleep", "loop"), HOST, weight=0),
    "between": Kind(True, ("middle",), ("sleep", "loop"), HOST, weight=0),
    "backward-one": Kind(True, ("backward",), ("sleep", "products"), COMPUTE, weight=0),
    "optimizer-one": Kind(True, ("optimizer",), ("sleep", "loop"), (*COMPUTE, *HOST), weight=0),
    "now-and-then": Kind(
        True,
        OUTSIDE,
        ("sleep",),
        ("rank-imbalance/intermittent", *HOST),
        weight=0,
        when="by chance",
        steady=False,
    ),
    "in-turn": Kind(
        False, OUTSIDE, ("sleep", "loop"), ("rank-imbalance/alternating",), weight=0, when="in turn"
    ),
    "checkpoint-barrier": Kind(
        True, ("after",), ("bytes together",), ("sync/checkpoint",), weight=0, steady=False
    ),
    "metrics": Kind(
        False, ("middle",), ("average",), ("sync/blocking-collective",), weight=0, tolerated=(*HOST, *PYTHON)
    ),
    "huge-model": Kind(
        False,
        (),
        (),
        HEAVY[:2],
        weight=0,
        tolerated=HEAVY,
        shape={"model": "mlp", "batch": 4, "parts": 1, "size": 1, "depth": 2},
        priced=False,
    ),
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
"""Kinds that may be combined in a program."""

PACED: Shape = {
    "model": "accelerator",
    "structure": "script",
    "data": "map",
    "workers": 0,
    "batch": 8,
    "parts": 1,
    "step_ms": 30.0,
    "loss_inside": False,
    "optimizers": 1,
}
EVALUATED = "from data import Samples\nfrom torch.utils.data import DataLoader\n"
EVALUATION = """\
model.eval()
with torch.no_grad():
    correct = torch.zeros(1)
    for ex, ey in DataLoader(Samples(32), 8):
        time.sleep(0.05)
        correct += (model.module(ex).argmax(1) == ey).sum()
    dist.all_reduce(correct)
model.train()
"""
TRAPS = {
    "trap-nothing": Asked(shape=PACED),
    "trap-accumulation": Asked(shape={**PACED, "parts": 4, "step_ms": 60.0}),
    "trap-by-hand": Asked(shape={**PACED, **BY_HAND, "step_ms": 60.0}),
    "trap-spawned": Asked(shape=PACED, spawned=True),
    "trap-four-ranks": Asked(shape={**PACED, "step_ms": 60.0}, world=4),
    "trap-single-rank": Asked(shape=PACED, world=1),
    "trap-tiny-steps": Asked(shape={**PACED, "step_ms": 0.0}),
    "trap-warm-up": Asked(shape=PACED, places={"middle": "if len(times.ms) < 5:\n    time.sleep(0.3)\n"}),
    "trap-evaluation": Asked(
        shape={**PACED, **WORKER, "structure": "nested"}, places={"start": EVALUATED, "epoch_end": EVALUATION}
    ),
    "trap-one-slow-step": Asked(
        shape=PACED, places={"after": "if len(times.ms) == 45 and rank == 1:\n    time.sleep(0.6)\n"}
    ),
    "trap-own-profiler": Asked(
        shape=PACED,
        places={
            "start": "profiler = torch.profiler.profile()\nprofiler.start()\n",
            "after": "if len(times.ms) == 20:\n    profiler.stop()\n",
        },
    ),
    "trap-neighbour": Asked(
        shape=PACED, places={"imports": "from neighbour import beside\n", "start": "beside(1.0)\n"}
    ),
    "trap-item-each-step": Asked(shape=PACED, places={"after": "loss.item()\n"}),
}
"""Healthy programs that look faulty. No finding is right for them."""
