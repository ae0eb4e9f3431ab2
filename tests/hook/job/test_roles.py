"""Which optimizers take over the role of which."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from ddpdoctor.hook.job import Role, Roles

torch = pytest.importorskip("torch")


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def stepped(roles: Roles, *optimizers: Any) -> list[Role]:
    found = []
    for optimizer in optimizers:
        found.append(roles.of(optimizer))
        found[-1].steps += 1
    return found


def test_one_made_for_each_step_has_one_role_whatever_its_id() -> None:
    roles, model = Roles(), torch.nn.Linear(4, 1)
    optimizer, found, ids = None, set(), set()
    for _ in range(20):
        optimizer = sgd(model)
        found.update(stepped(roles, optimizer))
        ids.add(id(optimizer))
    assert len(found) == 1 and len(ids) > 1


def test_the_id_of_one_that_is_gone_is_nobodys() -> None:
    roles, model = Roles(), torch.nn.Linear(4, 1)
    before = {}
    for _ in range(50):
        optimizer = sgd(model)
        (role,) = set(stepped(roles, optimizer, optimizer))
        assert role not in before.values()
        before[id(optimizer)] = role
        del optimizer
    assert len(before) < 50, "ids that were used again"


def test_one_that_has_stepped_twice_leaves_nothing_to_others() -> None:
    roles, generator, critic = Roles(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    alone = sgd(generator)
    (role, _) = stepped(roles, alone, alone)
    del alone
    pair = [sgd(critic), sgd(generator)]
    assert role not in stepped(roles, *pair) and len(set(stepped(roles, *pair))) == 2


def test_those_that_go_together_hand_on_to_those_over_their_parameters() -> None:
    roles, models = Roles(), [torch.nn.Linear(4, 4) for _ in range(3)]
    made = [sgd(model) for model in models]
    first = stepped(roles, *made)
    assert len(set(first)) == 3
    made.clear()
    assert stepped(roles, *[sgd(model) for model in reversed(models)]) == first[::-1]


def test_others_than_those_of_its_class_and_shapes_take_over_nothing() -> None:
    roles = Roles()
    made = [
        lambda: sgd(torch.nn.Linear(4, 1)),
        lambda: sgd(torch.nn.Linear(5, 1)),
        lambda: sgd(torch.nn.Linear(4, 1, bias=False)),
        lambda: torch.optim.Adam(torch.nn.Linear(4, 1).parameters()),
    ]
    first = [stepped(roles, make())[0] for make in made]
    assert len(set(first)) == 4
    assert [stepped(roles, make())[0] for make in made] == first


def test_two_over_the_same_parameters_may_step_in_turn_and_a_third_is_one_of_them() -> None:
    roles, model = Roles(), torch.nn.Linear(4, 1)
    kept = [sgd(model) for _ in range(6)]
    first, second, *others = stepped(roles, *kept)
    assert first is not second and set(others) == {second}
    # Those whose role was taken have others where they step again.
    assert len(set(stepped(roles, *kept))) == 6


def test_nothing_of_the_jobs_is_kept_or_referred_to() -> None:
    roles, model = Roles(), torch.nn.Linear(4, 1)
    optimizer = sgd(model)
    stepped(roles, optimizer)
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    assert not any(weakref.getweakrefs(parameter) for parameter in model.parameters())
    torch.utils.swap_tensors(model.weight, torch.nn.Parameter(torch.zeros(1, 4)))


class Odd:
    """What a scaler may be given."""

    __slots__ = ("param_groups",)


def test_what_is_no_optimizer_has_a_role_too() -> None:
    roles, odd = Roles(), Odd()
    assert len(stepped(roles, odd, object())) == 2
