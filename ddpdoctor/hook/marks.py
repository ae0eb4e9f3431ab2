"""What ``ddpdoctor.step()`` calls in a rank."""

from __future__ import annotations

from . import lifetime
from .guard import part
from .patching import guarded
from .recording import active

_PART = part("step marks")


def _mark() -> None:
    session = active.session or lifetime.arm_alone()
    if session is not None:
        session.follow_training_thread()
        session.stepping.mark()


step = guarded(_PART, _mark)
