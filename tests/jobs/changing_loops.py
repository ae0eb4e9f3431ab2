"""Loops that change in the midst: another optimizer, another way to step it."""

from __future__ import annotations

import contextlib

import torch
from shape_parts import LATER, ROUNDS, loss, net, sgd, shape
from torch import nn


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
