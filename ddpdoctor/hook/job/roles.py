"""The roles of optimizers in the training loop; the order of the roles determines where a step ends.

Most optimizers have their own role. A loop that creates a new optimizer for each step (federated rounds of one local
step, a meta-learning task, a helper that creates, steps and drops one) never steps the same object twice, and ids may
be reused. There a new optimizer takes over the role of one that stepped at most once:

* of a freed one of the same class, with the same parameters or else the same number of parameters of the same shapes;
* of one that is still referenced, if the new one is at least the third of its class with the same parameters. (Two may
  step alternately.) An optimizer whose role was taken over and that steps again gets a new role.

An optimizer that has stepped twice keeps its role: later optimizers then belong to another stage of training.

No object of the job is kept alive. Parameters are not referenced weakly either, because ``torch.utils.swap_tensors``, and
therefore ``Module.to``, refuses parameters with weak references.
"""

from __future__ import annotations

from typing import Any

from .registry import WeakMap
from .torch_objects import job_torch

MOST_OPEN = 256
"""Upper limit of the roles per kind that can be taken over, and of the kinds. Jobs that have more optimizers than this do not
recreate them for each step."""

_Kind = tuple[Any, ...]
"""Class, number of parameters, shapes of the first and the last parameter."""


class Role:
    """The role of an optimizer and of its successors."""

    __slots__ = ("first", "freed", "generation", "shared", "steps")

    def __init__(self) -> None:
        self.first = 0
        """The id of the first parameter. If the optimizer was freed, another object may have this id now."""
        self.generation = 0
        """Number of optimizers that have had this role."""
        self.steps = 0
        """Steps of the current optimizer; after the second, not all are counted."""
        self.freed = False
        """Whether the current optimizer has been freed."""
        self.shared = False
        """Whether a third optimizer with the same parameters took it over; later ones may then take it over, too."""


class _Assignment:
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
        """By kind: roles whose optimizers had stepped at most once when the last new optimizer of the kind appeared, oldest first.
        Kinds are ordered by when that was."""

    def of(self, optimizer: Any) -> Role:
        """The role of ``optimizer``, which steps or is about to."""
        assignment = self._assignments.find(optimizer)
        if assignment is not None and assignment.generation == assignment.role.generation:
            return assignment.role
        assignment = _Assignment(
            self._role_for_new(*_kind_and_first_parameter(optimizer)) if assignment is None else Role()
        )
        if type(optimizer).__weakrefoffset__:  # a scaler may be given an object without it
            self._assignments.hold(optimizer, assignment)
        return assignment.role

    def _role_for_new(self, kind: _Kind, first: int) -> Role:
        same_kind = [role for role in self._open.pop(kind, ()) if role.steps < 2]
        same_parameters = [role for role in same_kind if first and role.first == first]
        freed = next((role for role in (*same_parameters, *same_kind) if role.freed), None)
        if freed is not None:
            role = freed
        elif len(same_parameters) > 1 or any(role.shared for role in same_parameters):
            role = same_parameters.pop()
            role.shared = True
            same_kind = [each for each in same_kind if each not in same_parameters]
        else:
            role = Role()
            same_kind = [*same_kind[1 - MOST_OPEN :], role]
        self._open[kind] = same_kind
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        role.first = first
        return role

    def _note_freed(self, assignment: _Assignment) -> None:
        if assignment.generation == assignment.role.generation:
            assignment.role.freed = True


def _kind_and_first_parameter(optimizer: Any) -> tuple[_Kind, int]:
    """The kind of an optimizer and the id of its first parameter. If it has no standard ``param_groups``, only its class and 0."""
    class_name = type(optimizer).__module__, type(optimizer).__qualname__
    # Not getattr, which could run a property of the job.
    groups = getattr(optimizer, "__dict__", {}).get("param_groups")
    parameters = groups[0].get("params") if type(groups) is list and groups else None
    if type(parameters) is not list or not parameters:
        return class_name, 0
    first, last = parameters[0], parameters[-1]
    return (*class_name, len(parameters), _shape(first), _shape(last)), id(first)


def _shape(parameter: Any) -> Any:
    """The shape of a parameter; None for a subclass of the job, whose code would run."""
    return parameter.shape if type(parameter) is job_torch().nn.Parameter else None
