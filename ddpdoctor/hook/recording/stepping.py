"""Where training steps end: ties optimizer steps, backwards and the user's own marks to the recorder."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Callable, List, Optional

from .active import active
from .boundary import Boundary
from .recorder import Cut, Recorder

IN_BACKWARD = 0
"""The key of all optimizers that step inside a backward, together: one of them per parameter is one round. No ``id()`` is 0."""


class Stepping:
    """The steps of one recording. A user's mark, once seen, defines them alone."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.on_step: List[Callable[[int], None]] = []
        """Called with the number of the step that has just begun, on the training thread."""
        self.at_every_step: Optional[Callable[[int], None]] = None
        """The same, whether anybody listens or not."""
        self.listening = True
        """Unset once no listener waits for a step any more."""
        self.optimizer_steps = 0
        self.boundary = Boundary()
        self._candidate: Optional[Cut] = None
        self._by_mark = False

    def before_optimizer(self, key: int) -> None:
        """An optimizer is about to step, outermost. Need not be called where the boundary has no round open."""
        if not self._by_mark and self.boundary.before(key) and self._candidate is not None:
            self._end(self._candidate)

    def after_optimizer(self, key: int, at: int) -> None:
        """It has, at perf_counter_ns ``at``."""
        self.optimizer_steps += 1
        if self._by_mark:
            return
        recorder = self.recorder
        cut = recorder.cut(at) if active.full else (at, len(recorder.events), -1, -1)
        if key == self.boundary.alone or self.boundary.after(key):
            self._end(cut)
        else:
            self._candidate = cut

    def mark(self) -> None:
        """The user says that a step ends here."""
        self._by_mark = True
        self._end(self.recorder.cut(perf_counter_ns()))

    def finish(self) -> None:
        """No more steps: write the last one, if its end was only waiting to be confirmed."""
        if not self._by_mark and self._candidate is not None and self.boundary.round:
            self._end(self._candidate)

    def _end(self, cut: Cut) -> None:
        self._candidate = None
        self.recorder.end_step(cut)
        if self.at_every_step is not None:
            self.at_every_step(self.recorder.step)
        if self.listening:
            for listener in self.on_step:
                listener(self.recorder.step)
