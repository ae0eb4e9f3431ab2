"""Training loops of many shapes, one after the other in one job, each with a count of its own rounds.

    torchrun --nproc-per-node 2 loop_shapes.py --out FILE [--only NAME ...] [--thin]

Under the hook each shape is a recording of its own; with --thin of more rounds, and each rank records another share of its steps in
full. ``FILE.<rank>`` gets ``{"name": rounds, ...}`` in the
order in which they ran.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import sys

import torch
import torch.distributed as dist
from changing_loops import ROUNDS, SHAPES, loss, net, sgd, shape
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


@shape
def one_optimizer() -> int:
    model = net()
    optimizer = sgd(model)
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return ROUNDS


@shape
def accumulation() -> int:
    model = net()
    optimizer = sgd(model)
    for _ in range(ROUNDS):
        for micro in range(3):
            with model.no_sync() if micro < 2 else contextlib.nullcontext():
                loss(model).backward()
        optimizer.step()
    return ROUNDS


@shape
def accumulation_synced() -> int:
    model = net()
    optimizer = sgd(model)
    for _ in range(ROUNDS):
        for _ in range(3):
            loss(model).backward()
        optimizer.step()
    return ROUNDS


@shape
def gan() -> int:
    generator, critic = net(), net()
    first, second = sgd(generator), sgd(critic)
    for _ in range(ROUNDS):
        loss(critic).backward()
        second.step()
        loss(generator).backward()
        first.step()
    return ROUNDS


@shape
def two_optimizers_one_backward() -> int:
    one, two = net(), net()
    first, second = sgd(one), sgd(two)
    for _ in range(ROUNDS):
        (loss(one) + loss(two)).backward()
        first.step()
        second.step()
    return ROUNDS


@shape
def critic_more_often() -> int:
    generator, critic = net(), net()
    first, second = sgd(generator), sgd(critic)
    for number in range(ROUNDS * 2):
        loss(critic).backward()
        second.step()
        if number % 5 == 0:
            loss(generator).backward()
            first.step()
    return ROUNDS * 2


@shape
def two_stages() -> int:
    model = net()
    for _ in range(2):
        optimizer = sgd(model)
        for _ in range(ROUNDS):
            loss(model).backward()
            optimizer.step()
    return ROUNDS * 2


@shape
def optimizer_in_backward() -> int:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.module.parameters(), {"lr": 0.01})
    for _ in range(ROUNDS):
        loss(model.module).backward()
    return ROUNDS


@shape
def sharded_optimizer() -> int:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.01)
    for _ in range(ROUNDS):
        loss(model).backward()
        optimizer.step()
    return ROUNDS


@shape
def closure() -> int:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        return value

    for _ in range(ROUNDS):
        optimizer.step(evaluate)
    return ROUNDS


@shape
def scaler_that_skips() -> int:
    model = net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    for number in range(ROUNDS):
        optimizer.zero_grad()
        value = loss(model) * (float("inf") if number % 3 == 0 else 1.0)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
    return ROUNDS


@shape
def subclass_calling_super() -> int:
    class Chatty(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = net()
    optimizer = Chatty(model.parameters(), lr=0.01)
    for _ in range(ROUNDS):
        loss(model).backward()
        optimizer.step()
    return ROUNDS


@shape
def step_that_raises() -> int:
    model = net()
    optimizer = sgd(model)

    def broken() -> None:
        raise ValueError("planted")

    for number in range(ROUNDS):
        loss(model).backward()
        if number == 3:
            with contextlib.suppress(ValueError):
                optimizer.step(broken)
        optimizer.step()
    return ROUNDS


@shape
def no_ddp() -> int:
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        loss(model).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    return ROUNDS


@shape
def evaluation_between() -> int:
    model = net()
    optimizer = sgd(model)
    for _ in range(2):
        for _ in range(ROUNDS):
            loss(model).backward()
            optimizer.step()
        with torch.no_grad():
            for _ in range(4):
                loss(model)
    return ROUNDS * 2


@shape
def own_optimizer_with_marks() -> int:
    import ddpdoctor

    model = net()
    for _ in range(ROUNDS):
        loss(model).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        ddpdoctor.step()
    return ROUNDS


@shape
def marks_and_optimizer() -> int:
    import ddpdoctor

    model = net()
    optimizer = sgd(model)
    for _ in range(ROUNDS):
        loss(model).backward()
        optimizer.step()
        ddpdoctor.step()
    return ROUNDS


@shape
def join_uneven() -> int:
    from torch.distributed.algorithms.join import Join

    model = net()
    optimizer = sgd(model)
    rounds = ROUNDS + dist.get_rank()
    with Join([model]):
        for _ in range(rounds):
            loss(model).backward()
            optimizer.step()
    return rounds


@shape
def many_short_epochs() -> int:
    from torch.utils.data import DataLoader, TensorDataset

    model = net()
    optimizer = sgd(model)
    loader = DataLoader(
        TensorDataset(torch.randn(5, 4)), batch_size=2
    )  # the last batch of each epoch is smaller
    rounds = 0
    for _ in range(ROUNDS):
        for (data,) in loader:
            model(data).square().mean().backward()
            optimizer.step()
            rounds += 1
    return rounds


@shape
def fully_sharded() -> int:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = sgd(model)
    for _ in range(ROUNDS):
        loss(model).backward()
        optimizer.step()
    return ROUNDS


@shape
def flat_sharded() -> int:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(4, 1), device_id=torch.device("cpu"))
    optimizer = sgd(model)
    for _ in range(ROUNDS):
        loss(model).backward()
        optimizer.step()
    return ROUNDS


@shape
def engine_of_its_own() -> int:
    """As DeepSpeed does: gradients in one flat buffer, reduced by the engine, which steps an optimizer of flat copies."""

    class Engine:
        def __init__(self, module: nn.Module) -> None:
            self.module = module
            self.flat = nn.Parameter(nn.utils.parameters_to_vector(module.parameters()).detach())
            self.optimizer = torch.optim.Adam([self.flat])

        def backward(self, value: torch.Tensor) -> None:
            value.backward()
            self.flat.grad = torch.cat([each.grad.flatten() for each in self.module.parameters()])
            dist.all_reduce(self.flat.grad)

        def step(self) -> None:
            self.optimizer.step()
            nn.utils.vector_to_parameters(self.flat.detach(), self.module.parameters())
            self.module.zero_grad()

    engine = Engine(nn.Linear(4, 1))
    for _ in range(ROUNDS):
        engine.backward(loss(engine.module))
        engine.step()
    return ROUNDS


@shape
def never_steps() -> int:
    model = net()
    for _ in range(ROUNDS):
        loss(model).backward()
    return 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--thin", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    thinning = sys.modules.get("_ddpdoctor.hook.recording.recorder")
    if options.thin and thinning is not None:
        every = 2 << dist.get_rank()
        thinning.Thinning.next_block = lambda self, step, cost_ns, step_ns: not step // 8 % every
    lifetime = sys.modules.get("_ddpdoctor.hook.lifetime")
    counts = {}
    for name, function in SHAPES.items():
        if options.only and name not in options.only:
            continue
        if lifetime is not None and counts:
            lifetime.arm(dist.get_rank(), dist.get_world_size())
        counts[name] = function()
        dist.barrier()
        if lifetime is not None:
            lifetime.disarm()
            # The next one must find the folder of this one there, on every rank.
            dist.barrier()
    with open(f"{options.out}.{dist.get_rank()}", "w") as out:
        json.dump(counts, out)
    atexit._run_exitfuncs()
    os._exit(0)


if __name__ == "__main__":
    main()
