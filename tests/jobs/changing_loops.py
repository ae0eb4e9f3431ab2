"""What loops of many shapes have in common, see ``loop_shapes.py``; and loops that change in the midst: another optimizer, another way to
step it; or new optimizers for each step, for some, for each round."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ROUNDS = 60 if "--thin" in sys.argv else 7
LATER = ROUNDS * 3 // 7
"""In the midst of a block of steps of which only the times are kept, where there are such."""
SHAPES: dict[str, Callable[[], int]] = {}


def shape(function: Callable[[], int]) -> Callable[[], int]:
    SHAPES[function.__name__] = function
    return function


def net() -> DDP:
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(2, 4)).square().mean()


@shape
def another_optimizer_later() -> int:
    model, other = net(), nn.Linear(4, 1)
    optimizer, later = sgd(model), torch.optim.Adam(other.parameters())
    for round_ in range(ROUNDS):
        if round_ >= LATER:
            loss(other).backward()
            later.step()
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return ROUNDS


@shape
def another_optimizer_instead() -> int:
    model, other = net(), nn.Linear(4, 1)
    optimizer, later = sgd(model), torch.optim.Adam(other.parameters())
    for round_ in range(ROUNDS):
        loss(model if round_ < LATER else other).backward()
        (optimizer if round_ < LATER else later).step()
    return ROUNDS


@shape
def parent_is_used_later() -> int:
    """torch hooks the step of a class when the first optimizer of that very class is made."""

    class Own(torch.optim.RMSprop):
        def step(self, closure: None = None) -> None:
            super().step(closure)

    model = net()
    optimizer = Own(model.parameters())
    for round_ in range(ROUNDS):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
        if round_ == LATER:
            torch.optim.RMSprop(nn.Linear(1, 1).parameters())
    return ROUNDS


@shape
def stepped_from_two_places() -> int:
    model = net()
    optimizer = sgd(model)

    def step() -> None:
        optimizer.step()

    for round_ in range(ROUNDS):
        optimizer.zero_grad()
        loss(model).backward()
        if round_ % 3:
            optimizer.step()
        else:
            step()
    return ROUNDS


@shape
def step_that_raises_later() -> int:
    class Failing(torch.optim.Adagrad):
        def step(self, closure: None = None) -> None:
            if self.fail:
                raise RuntimeError("as asked")
            super().step(closure)

    model = net()
    optimizer = Failing(model.parameters())
    for round_ in range(ROUNDS):
        optimizer.fail = round_ % 5 == 4
        loss(model).backward()
        with contextlib.suppress(RuntimeError):
            optimizer.step()
    return ROUNDS - ROUNDS // 5


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


@shape
def new_for_each_step() -> int:
    """Each is made while the one before is still there, so their ids take turns."""
    model = net()
    for _ in range(ROUNDS):
        optimizer = sgd(model)
        loss(model).backward()
        optimizer.step()
    return ROUNDS


@shape
def new_in_a_helper() -> int:
    """Gone when the helper returns, so the next one may have its id."""
    model = net()

    def update() -> None:
        optimizer = adam(model)
        loss(model).backward()
        optimizer.step()

    for _ in range(ROUNDS):
        update()
    return ROUNDS


@shape
def new_for_one_to_three_steps() -> int:
    model = net()
    taken = 0
    while taken < ROUNDS:
        optimizer = sgd(model)
        for _ in range(min(1 + taken % 3, ROUNDS - taken)):
            loss(model).backward()
            optimizer.step()
            taken += 1
    return ROUNDS


@shape
def new_pair_for_each_round() -> int:
    generator, critic = net(), net()
    for _ in range(ROUNDS):
        first, second = adam(critic), adam(generator)
        loss(critic).backward()
        first.step()
        loss(generator).backward()
        second.step()
    return ROUNDS


@shape
def new_one_beside_one_that_stays() -> int:
    """As in meta-learning: both over the same parameters."""
    model = net()
    outer = sgd(model)
    for _ in range(ROUNDS):
        inner = sgd(model)
        loss(model).backward()
        inner.step()
        loss(model).backward()
        outer.step()
    return ROUNDS


@shape
def new_pair_of_which_one_steps_less_often() -> int:
    generator, critic = net(), net()
    for round_ in range(ROUNDS):
        first = adam(critic)
        loss(critic).backward()
        first.step()
        if round_ % 3 == 1:
            second = sgd(generator)
            loss(generator).backward()
            second.step()
    return ROUNDS


@shape
def new_for_each_layer() -> int:
    """One for each parameter, all of them for each round."""
    model = net()
    for _ in range(ROUNDS):
        optimizers = [torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()]
        loss(model).backward()
        for optimizer in optimizers:
            optimizer.step()
    return ROUNDS


@shape
def new_with_a_new_model() -> int:
    """A federated round: a copy of the model takes one step, and the copies are averaged."""
    model = nn.Linear(4, 1)
    for _ in range(ROUNDS):
        local = copy.deepcopy(model)
        optimizer = sgd(local)
        loss(local).backward()
        optimizer.step()
        for parameter, own in zip(model.parameters(), local.parameters(), strict=True):
            dist.all_reduce(own.detach())
            parameter.data.copy_(own.detach() / dist.get_world_size())
    return ROUNDS


@shape
def new_and_kept() -> int:
    """All of them are kept, so that the first two look like two that step in turn."""
    model = net()
    kept = []
    for _ in range(ROUNDS):
        kept.append(sgd(model))
        loss(model).backward()
        kept[-1].step()
    return ROUNDS - 1


@shape
def pair_over_the_same_parameters() -> int:
    model = net()
    first, second = adam(model), adam(model)
    for _ in range(ROUNDS):
        loss(model).backward()
        first.step()
        loss(model).backward()
        second.step()
    return ROUNDS


@shape
def pair_after_one_alone() -> int:
    """A generator that is trained alone first, by an optimizer of its own that is gone then."""
    generator, critic = net(), net()

    def alone() -> None:
        optimizer = adam(generator)
        for _ in range(LATER):
            loss(generator).backward()
            optimizer.step()

    alone()
    first, second = adam(generator), adam(critic)
    for _ in range(ROUNDS - LATER):
        loss(generator).backward()
        first.step()
        loss(critic).backward()
        second.step()
    return ROUNDS
