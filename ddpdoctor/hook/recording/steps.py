"""Decides which optimizer steps end a step of the job, and calls the listeners."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Callable

from ..job import Role
from .active import active, starts
from .recorder import Cut, Recorder


class Boundary:
    """Finds the ends of rounds from the roles of optimizers. Call ``before`` and ``after`` for each of their steps, in order."""

    def __init__(self) -> None:
        self.round: dict[Role, None] = {}
        """Optimizers that have stepped since the last known end of a round, in order."""
        self.only_role: Role | None = None
        """The role of the only optimizer, if each of its steps is a round."""
        self._always: set[Role] = set()
        self._last: Role | None = None

    def before(self, role: Role) -> bool:
        """Handle an imminent optimizer step. Returns whether a round ended at the previous optimizer step."""
        if role not in self.round:
            return False
        self._learn()
        return True

    def after(self, role: Role) -> bool:
        """Handle an optimizer step. Returns whether a round ends with it."""
        if role not in self.round:
            self.round[role] = None
        if role is not self._last:
            self.only_role = None
            return False
        self._learn()
        return True

    def _learn(self) -> None:
        both = self._always.intersection(self.round)
        self._always = both or set(self.round)
        self._last = [role for role in self.round if role in self._always][-1]
        self.only_role = self._last if len(self.round) == len(self._always) == 1 else None
        self.round.clear()


IN_BACKWARD = Role()
"""The common role of all optimizers that step inside a backward. Together, one step of each is one round."""


class Stepping:
    """The steps of one recording. After the user's first mark, only marks end steps."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.on_step: list[Callable[[int], None]] = []
        """Called with the number of the step that has just begun, on the training thread."""
        self.at_every_step: Callable[[int], None] | None = None
        """Called in the same way even without listeners, but not after brief steps (:class:`.active.OptimizerStarts`)."""
        self._listening = True
        self.needs_every_step = False
        """Whether ``at_every_step`` must be called after brief steps, too."""
        self._handled_steps = 0
        self.boundary = Boundary()
        self._candidate: Cut | None = None
        self._by_mark = False

    @property
    def listening(self) -> bool:
        """False if no listener waits for a step any more."""
        return self._listening

    @listening.setter
    def listening(self, whether: bool) -> None:
        self._listening = whether
        if whether:
            starts.full = True

    @property
    def optimizer_steps(self) -> int:
        """A count that grows with each optimizer step, including brief steps."""
        return self._handled_steps + self.recorder.step

    def before_optimizer(self, role: Role) -> None:
        """Handle an imminent outermost optimizer step. Need not be called if the boundary has no open round."""
        if not self._by_mark and self.boundary.before(role) and self._candidate is not None:
            self._end(self._candidate)

    def after_optimizer(self, role: Role, at: int) -> None:
        """Handle an optimizer step that ended at perf_counter_ns ``at``."""
        self._handled_steps += 1
        role.steps += 1
        if self._by_mark:
            return
        recorder = self.recorder
        cut = recorder.cut(at) if active.full or recorder.events else (at, 0, -1, -1)
        if role is self.boundary.only_role or self.boundary.after(role):
            self._end(cut)
        else:
            self._candidate = cut

    def after_brief(self, at: int) -> None:
        """Handle a brief step's end, at perf_counter_ns ``at``."""
        if self._listening or not self.recorder.end_brief_step(at):
            if self._listening:
                # Listening was set just when steps became brief.
                starts.full = True
            self._end(self.recorder.cut(at) if self.recorder.events else (at, 0, -1, -1))

    @property
    def only_role(self) -> Role | None:
        """The role of the optimizer that ends every step, if the start of its step need not be recorded; otherwise None."""
        by_optimizer = not (self._by_mark or self._listening or self.needs_every_step)
        return self.boundary.only_role if by_optimizer else None

    def mark(self) -> None:
        """End the step at the user's mark."""
        starts.full = self._by_mark = True
        self._end(self.recorder.cut(perf_counter_ns()))

    def finish(self) -> None:
        """End the last step if its end was found but not yet confirmed."""
        if not self._by_mark and self._candidate is not None and self.boundary.round:
            self._end(self._candidate)

    def _end(self, cut: Cut) -> None:
        self._candidate = None
        self.recorder.end_step(cut)
        if self.at_every_step is not None:
            self.at_every_step(self.recorder.step)
        if self._listening:
            for listener in self.on_step:
                listener(self.recorder.step)
