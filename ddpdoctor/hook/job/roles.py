"""The roles of optimizers in the training loop; the order of the roles determines where a step ends.

Most optimizers have a role of their own. A loop that makes a new one for each of its steps (federated rounds of one
local step, a task of meta-learning, a helper that makes one, steps it and drops it) never steps the same object twice,
and its id may or may not be reused. There an optimizer takes over a role from one that had stepped at most once:

* from one that was freed, of the same class and over the same parameters, or else over as many of the same shapes;
* from one that is still referenced, or in a cycle of references, if it is the third of its class over the very same
  parameters: two may well step alternately. An optimizer whose role was taken over and that steps again gets another
  role.

One that has stepped twice keeps its role: the next optimizers belong to another stage of training, with roles of their
own.

No object of the job is kept alive, and no parameter is referred to weakly either: ``torch.utils.swap_tensors``, and by
it ``Module.to``, refuses those.
"""

from __future__ import annotations

from typing import Any

from .registry import WeakMap
from .torch_objects import job_torch

MOST_OPEN = 256
"""Roles of a kind that can be taken over, and kinds: more optimizers than this, each for some of the parameters, are
not made again for each step."""

_Kind = tuple[Any, ...]
"""Class, number of parameters, and shapes of the first and the last."""


class Role:
    """The role of an optimizer and of those made in its place."""

    __slots__ = ("first", "freed", "generation", "shared", "steps")

    def __init__(self) -> None:
        self.first = 0
        """The id of the first parameter: of an optimizer that was freed it may be another's by now."""
        self.generation = 0
        """How many optimizers have had this role."""
        self.steps = 0
        """Steps of the optimizer that has it; after the second, not all are counted."""
        self.freed = False
        """Whether that optimizer has been freed."""
        self.shared = False
        """Whether the third optimizer over its parameters took it; later ones may then take it too."""


class _Assignment:
    """The assignment of a role to one optimizer."""

    __slots__ = ("generation", "role")

    def __init__(self, role: Role) -> None:
        role.generation += 1
        role.steps, role.freed = 0, False
        self.role, self.generation = role, role.generation


class Roles:
    """Assigns roles to optimizers."""

    def __init__(self) -> None:
        self._assignments: WeakMap[_Assignment] = WeakMap(self._note_freed)
        self._open: dict[_Kind, list[Role]] = {}
        """By kind, roles whose optimizers had stepped at most once when an optimizer of the kind was last new, in
        the order in which they first appeared; kinds are ordered by when one was last new."""

    def of(self, optimizer: Any) -> Role:
        """The role of an optimizer that steps."""
        assignment = self._assignments.find(optimizer)
        if assignment is not None and assignment.generation == assignment.role.generation:
            return assignment.role
        assignment = _Assignment(self._next(*_described(optimizer)) if assignment is None else Role())
        if type(optimizer).__weakrefoffset__:  # as whatever a scaler is given may not have
            self._assignments.hold(optimizer, assignment)
        return assignment.role

    def _next(self, kind: _Kind, first: int) -> Role:
        """The role for a new optimizer."""
        alike = [role for role in self._open.pop(kind, ()) if role.steps < 2]
        same = [role for role in alike if first and role.first == first]
        left = next((role for role in (*same, *alike) if role.freed), None)
        if left is not None:
            role = left
        elif len(same) > 1 or any(role.shared for role in same):
            role = same.pop()
            role.shared = True
            alike = [each for each in alike if each not in same]
        else:
            role = Role()
            alike = [*alike[1 - MOST_OPEN :], role]
        self._open[kind] = alike
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        role.first = first
        return role

    def _note_freed(self, assignment: _Assignment) -> None:
        if assignment.generation == assignment.role.generation:
            assignment.role.freed = True


def _described(optimizer: Any) -> tuple[_Kind, int]:
    """The kind of an optimizer, and the id of its first parameter; only the class if it keeps its parameters in
    another way."""
    of_class = type(optimizer).__module__, type(optimizer).__qualname__
    # Not by getattr: a property would be the job's code.
    groups = getattr(optimizer, "__dict__", {}).get("param_groups")
    parameters = groups[0].get("params") if type(groups) is list and groups else None
    if type(parameters) is not list or not parameters:
        return of_class, 0
    first, last = parameters[0], parameters[-1]
    return (*of_class, len(parameters), _shape(first), _shape(last)), id(first)


def _shape(parameter: Any) -> Any:
    """The shape of a parameter; None for one of the job's own class, whose code would run."""
    return parameter.shape if type(parameter) is job_torch().nn.Parameter else None
