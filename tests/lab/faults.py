"""The faults: mistakes as people make them, each with the rules that may name it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .planting import HERE, Plant

DDP_SCRIPTS = ("mlp", "cnn", "transformer", "accumulate", "spawned")
LOADERS = ("mlp", "cnn", "transformer", "spawned")
WORKERS = ("cnn", "transformer")
LOOPS = ("mlp", "cnn", "transformer", "spawned", "byhand")


@dataclass(frozen=True)
class Draw:
    """What chance and the healthy run decide for one case."""

    cost_ms: float
    """What the fault shall add to a step."""
    base_ms: float
    """A step of the same job without it."""
    rank: int
    batch: int
    """Samples per step and rank."""
    steps: int
    random: Random

    def sleep(self, share: float = 1.0) -> str:
        return f"time.sleep({self.cost_ms * share / 1e3:.6f})"


@dataclass(frozen=True)
class Fault:
    """A kind of mistake."""

    name: str
    rules: tuple[str, ...]
    """Ids of the rules that are right as the verdict."""
    plant: Callable[[Draw], Plant]
    scripts: tuple[str, ...]
    one_rank: bool = True
    """Whether one rank is the culprit; otherwise all are."""
    rank: int | None = None
    """The culprit, where it is always the same."""
    sized: bool = True
    """Whether the cost can be chosen; otherwise it is what it is."""
    by_chance: bool = False
    """Whether chance decides how often it happens: a run may hold less of it than was planted."""
    base: Callable[[Draw], Plant] | None = None
    """What the job without the fault has as well."""
    has_line: bool = True
    without_ddp: tuple[str, ...] = ()
    """More rules that are right in a job without DDP, where nothing marks the forward."""

    def right_rules(self, script: str) -> tuple[str, ...]:
        """Rules that are right in this script."""
        return self.rules + (self.without_ddp if script == "byhand" else ())


def _in_dataset(draw: Draw, script_workers: bool, condition: str) -> Plant:
    # A worker makes batches beside the steps, so only what it takes beyond a step is waited for.
    whole = draw.cost_ms + (draw.base_ms if script_workers else 0.0)
    code = f"time.sleep({whole / draw.batch / 1e3:.6f}){HERE}"
    return Plant({"dataset": f"{condition}    {code}" if condition else code}, here="# the loader")


def _rank_code(slot: str) -> Callable[[Draw], Plant]:
    return lambda draw: Plant({slot: f"if {{rank}} == {draw.rank}:\n    {draw.sleep()}{HERE}"})


def _in_backward(draw: Draw) -> Plant:
    top = (
        "class Careful(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return x.view_as(x)\n\n"
        f"    @staticmethod\n    def backward(ctx, gradient):\n        {draw.sleep()}{HERE}\n        return gradient\n\n"
    )
    return Plant(
        {"top": top, "forward": f"if {{rank}} == {draw.rank}:\n    {{var}} = Careful.apply({{var}})"}
    )


def _in_optimizer(draw: Draw) -> Plant:
    top = (
        "class CarefulSGD(torch.optim.SGD):\n    def step(self, closure=None):\n"
        f"        if dist.get_rank() == {draw.rank}:\n            {draw.sleep()}{HERE}\n        return super().step(closure)\n\n"
    )
    return Plant({"top": top}, swaps=(("torch.optim.SGD(model", "CarefulSGD(model"),))


def _log_to_file(draw: Draw) -> Plant:
    top = (
        "import json\nimport tempfile\n\n\ndef write_metrics(step, values):\n"
        '    with open(tempfile.gettempdir() + "/lab-metrics.jsonl", "w") as file:\n'
        '        json.dump({"step": step, "values": values}, file)\n'
        f"        {draw.sleep()}{HERE}\n\n"
    )
    return Plant(
        {"top": top, "loop_end": f"if {{rank}} == {draw.rank}:\n    write_metrics(0, [1.0] * 20){HERE}"}
    )


def _every_k(draw: Draw) -> Plant:
    every = draw.random.choice((5, 8, 10))
    top = (
        f"ROUND = [0]\n\n\ndef summarize(model):\n    ROUND[0] += 1\n    if ROUND[0] % {every} == 0:\n"
        f"        {draw.sleep(every)}{HERE}\n\n"
    )
    return Plant({"top": top, "loop_end": f"if {{rank}} == {draw.rank}:\n    summarize(None){HERE}"})


def _now_and_then(draw: Draw) -> Plant:
    top = f"import random\n\nCHANCE = random.Random({draw.random.randrange(10**6)})\n\n"
    code = f"if CHANCE.random() < 0.1 and {{rank}} == {draw.rank}:\n    {draw.sleep(10)}{HERE}"
    return Plant({"top": top, "loop_end": code})


def _in_turn(draw: Draw) -> Plant:
    code = f"TURN[0] += 1\nif TURN[0] % dist.get_world_size() == {{rank}}:\n    {draw.sleep()}{HERE}"
    return Plant({"top": "TURN = [0]\n\n", "loop_end": code})


def _collect_ms_per_object() -> float:
    heap = [[n] for n in range(200_000)]
    started = time.perf_counter()
    gc.collect()
    return (time.perf_counter() - started) * 1e3 / len(heap)


def _collections(draw: Draw) -> Plant:
    objects = int(draw.cost_ms / _collect_ms_per_object())
    return Plant(
        {
            "top": f"import gc\n\ngc.freeze()\nCACHE = [[n] for n in range({objects})]\n\n",
            "loop_end": f"if {{rank}} == {draw.rank}:\n    gc.collect(){HERE}",
        }
    )


def _checkpoint(barrier: bool) -> Callable[[Draw], Plant]:
    def plant(draw: Draw) -> Plant:
        every = draw.random.choice((6, 10))
        top = (
            "import io\n\nROUND = [0]\n\n\nclass NetworkShare(io.BytesIO):\n    def write(self, data):\n"
            f"        time.sleep(len(data) * {draw.cost_ms * every / 1e3:.6f} / 4e6){HERE}\n        return super().write(data)\n\n\n"
            f"def save(rank):\n    ROUND[0] += 1\n    if ROUND[0] % {every} == 0:\n"
            "        if rank == 0:\n"
            f'            torch.save({{"step": ROUND[0], "ema": torch.zeros(1_000_000)}}, NetworkShare()){HERE}\n'
            + ("        dist.barrier()\n" if barrier else "")
        )
        return Plant({"top": top + "\n", "loop_end": f"save({{rank}}){HERE}"})

    return plant


def _uneven_halves(draw: Draw) -> Plant:
    """Lengths that vary: a step is long either in its forward or in its backward, never the same on neighbouring ranks, and evens
    out unless all must meet in between."""
    top = (
        "TURN = [0]\n\n\nclass Length(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        f"        TURN[0] += 1\n        if (TURN[0] + dist.get_rank()) % 2:\n            {draw.sleep()}\n        return x.view_as(x)\n\n"
        "    @staticmethod\n    def backward(ctx, gradient):\n"
        f"        if (TURN[0] + dist.get_rank()) % 2 == 0:\n            {draw.sleep()}\n        return gradient\n\n"
    )
    return Plant({"top": top, "forward": "{var} = Length.apply({var})"})


def _barrier(draw: Draw) -> Plant:
    return Plant(_uneven_halves(draw).code | {"between": f"dist.barrier(){HERE}"})


def _metrics(draw: Draw) -> Plant:
    return Plant(_uneven_halves(draw).code | {"between": f"dist.all_reduce(loss.detach().clone()){HERE}"})


def _many_metrics(draw: Draw) -> Plant:
    count = max(4, round(draw.cost_ms / 0.4))
    return Plant({"after_backward": f"for _ in range({count}):\n    dist.all_reduce(torch.ones(2)){HERE}"})


def _worker_start(draw: Draw) -> Plant:
    # The job has four epochs.
    top = f"def init_worker(_):\n    time.sleep({draw.cost_ms * draw.steps / 4 / 1e3:.6f})\n\n"
    return Plant(
        {"top": top},
        swaps=(("persistent_workers=True", "worker_init_fn=init_worker"),),
        here="# the loader",
    )


def _uneven_batch(draw: Draw) -> Plant:
    more = max(1, round(draw.batch * draw.cost_ms / draw.base_ms))
    return Plant({"setup": f"if {{rank}} == {draw.rank}:\n    batch_size += {more}"}, here="# the loader")


def _all(slot: str) -> Callable[[Draw], Plant]:
    return lambda draw: Plant({slot: draw.sleep() + HERE})


DATA_ONE = ("dataloader/one-rank-late",)
COMPUTE = ("rank-imbalance/slow-compute",)
HOST = ("rank-imbalance/host-work",)
NOW_AND_THEN = ("rank-imbalance/intermittent", "rank-imbalance/host-work")
_ONE = "if {{rank}} == {rank}:\n"

FAULTS = (
    Fault("data-all", ("dataloader/starved",), lambda d: _in_dataset(d, False, ""), ("mlp", "spawned"), one_rank=False),
    Fault("data-all-worker", ("dataloader/starved",), lambda d: _in_dataset(d, True, ""), WORKERS, one_rank=False),
    Fault("data-one", DATA_ONE, lambda d: _in_dataset(d, False, _ONE.format(rank=d.rank)), ("mlp", "spawned")),
    Fault("data-one-worker", DATA_ONE, lambda d: _in_dataset(d, True, _ONE.format(rank=d.rank)), WORKERS),
    Fault("generator-one", HOST + DATA_ONE, _rank_code("generator"), ("byhand",)),
    Fault("generator-all", ("host/python-work", "dataloader/starved"), _all("generator"), ("byhand",), one_rank=False),
    Fault("forward-one", COMPUTE, _rank_code("forward"), (*LOOPS,), without_ddp=HOST),
    Fault("backward-one", COMPUTE, _in_backward, ("mlp", "transformer", "spawned", "byhand", "cnn")),
    Fault("between-one", HOST, _rank_code("between"), LOOPS),
    Fault("before-average-one", HOST, _rank_code("before_average"), ("byhand",)),
    Fault("after-backward-one", HOST, _rank_code("after_backward"), (*LOOPS, "accumulate")),
    Fault("optimizer-one", COMPUTE + HOST, _in_optimizer, ("mlp", "cnn", "accumulate")),
    Fault("uneven-batch", ("rank-imbalance/uneven-work",), _uneven_batch, ("mlp", "spawned")),
    Fault("log-one", HOST, _log_to_file, (*LOOPS, "accumulate")),
    Fault("every-k-one", NOW_AND_THEN, _every_k, (*LOOPS, "accumulate")),
    Fault("intermittent", NOW_AND_THEN, _now_and_then, (*LOOPS, "accumulate"), by_chance=True),
    Fault("gc-one", ("rank-imbalance/garbage-collection",), _collections, LOOPS),
    Fault("checkpoint", ("sync/checkpoint",), _checkpoint(False), ("mlp", "transformer", "byhand"), rank=0),
    Fault("checkpoint-barrier", ("sync/checkpoint",), _checkpoint(True), ("cnn", "spawned"), rank=0),
    Fault("barrier", ("sync/explicit-barrier",), _barrier, ("mlp", "spawned", "transformer"), one_rank=False, base=_uneven_halves),
    Fault("metrics", ("sync/blocking-collective",), _metrics, ("mlp", "spawned", "transformer"), one_rank=False, base=_uneven_halves),
    Fault("many-metrics", ("sync/blocking-collective",), _many_metrics, DDP_SCRIPTS, one_rank=False, sized=False),
    Fault("worker-start", ("dataloader/worker-restart",), _worker_start, ("cnn",), one_rank=False),
    Fault("python-all", ("host/python-work",), _all("loop_end"), LOOPS, one_rank=False),
    Fault(
        "tiny-buckets",
        ("allreduce/small-buckets",),
        lambda d: Plant(swaps=(("args.batch))  # the model", "args.batch), bucket_cap_mb=0.002)  # the model"),), here="# the model"),
        ("mlp",),
        one_rank=False,
        sized=False,
        base=lambda d: Plant(arguments=("--depth", "60")),
    ),
    Fault(
        "huge-model",
        ("allreduce/communication-bound", "allreduce/not-overlapped"),
        lambda d: Plant(arguments=("--width", "1500")),
        ("mlp",),
        one_rank=False,
        sized=False,
        has_line=False,
    ),
    Fault(
        "no-no-sync",
        ("allreduce/redundant-sync",),
        lambda d: Plant(swaps=((" if last else model.no_sync()", ""),), here="# the backward"),
        ("accumulate",),
        one_rank=False,
        sized=False,
        base=lambda d: Plant(arguments=("--width", "900")),
    ),
    Fault("in-turn", ("rank-imbalance/alternating",), _in_turn, LOOPS, one_rank=False),
)  # fmt: skip


def find(name: str) -> Fault:
    """The fault of that name."""
    return next(fault for fault in FAULTS if fault.name == name)
