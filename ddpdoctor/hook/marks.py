"""What ``ddpdoctor.step()`` calls in a rank."""

from __future__ import annotations

from . import session
from .guard import part
from .patching import guarded

_PART = part("step marks")


def _mark() -> None:
    current = session.current or session.arm_alone_now()
    if current is not None:
        current.follow_training_thread()
        current.stepping.mark()


step = guarded(_PART, _mark)
