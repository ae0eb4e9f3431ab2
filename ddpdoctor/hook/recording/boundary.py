"""Which optimizer step ends a training step, for jobs with one optimizer or several.

A training step is one round of the training loop, seen only through the order in which optimizers step:

* One optimizer: each of its steps ends a training step.
* Several that step once a round each (a GAN's two, with a backward each or shared): the last of the round ends it.
* Some less often than others (a generator every fifth round): among those that step in every round, the last ends it. A round
  in which one stepped five times and another once cannot be told from five rounds, and counts as five.
* Other optimizers take over (a second stage of training): from their second step on, they define the rounds.
* New ones for each round, of which none steps twice: they have the same roles (:mod:`..job.roles`), and those step again.

The rule looks at nothing but that order, which data-parallel ranks share, so they all count alike. A round is known to be over
without doubt when an optimizer steps for a second time. Until the order is learnt, and when it changes, the round therefore
ends in hindsight, at the last optimizer step before that second one; afterwards it ends at once.
"""

from __future__ import annotations

from typing import Dict, Optional, Set

from ..job import Role


class Boundary:
    """Fed with the optimizer's role for each of their steps, in order: ``before`` and ``after`` it."""

    def __init__(self) -> None:
        self.round: Dict[Role, None] = {}
        """Optimizers that have stepped since the last round's known end, in order."""
        self.alone: Optional[Role] = None
        """The only optimizer there is, each of whose steps is a round: nothing needs to be learnt from its next one."""
        self._always: Set[Role] = set()
        self._last: Optional[Role] = None

    def before(self, role: Role) -> bool:
        """An optimizer is about to step. True: a round has ended, at the end of the optimizer step before this one."""
        if role not in self.round:
            return False
        self._learn()
        return True

    def after(self, role: Role) -> bool:
        """An optimizer has stepped. True: the round ends here."""
        if role not in self.round:
            self.round[role] = None
        if role is not self._last:
            self.alone = None
            return False
        self._learn()
        return True

    def _learn(self) -> None:
        both = self._always.intersection(self.round)
        self._always = both or set(self.round)
        self._last = [role for role in self.round if role in self._always][-1]
        self.alone = self._last if len(self.round) == len(self._always) == 1 else None
        self.round.clear()
