"""What runs beside the training thread of a rank: the writer, the sampler, the settings and the profiler
window.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from . import settings
from .guard import part
from .patching import guarded
from .sampler import Sampler
from .window import LAST_SETTINGS_STEP, Window
from .writer import Writer

if TYPE_CHECKING:
    from .session import Session

_PART = part("step log")


class Services:
    """The helpers of one session."""

    def __init__(self, session: "Session") -> None:
        self.writer = Writer(session)
        self.sampler = Sampler(session)
        self.window = Window(session, self.writer)


_running: "dict[int, Services]" = {}


def start(session: "Session") -> None:
    """Begin to write, sample and wait for the profiler window."""
    session.document = settings.at_start(session)
    services = _running[id(session)] = Services(session)

    def at_step(step: int) -> None:
        if step == LAST_SETTINGS_STEP:
            settings.after_first_steps(session)
            services.writer.document_changed.set()

    session.stepping.on_step.append(guarded(_PART, at_step))
    session.stepping.on_step.append(guarded(services.window.part, services.window.at_step))
    services.writer.start()
    services.sampler.start()


def flush(session: "Session") -> None:
    """Everything recorded so far to the run directory."""
    services = _running.get(id(session))
    if services is not None:
        session.stepping.finish()
        if session.devices is not None:
            session.devices.finish()
        settings.after_first_steps(session)
        guarded(services.window.part, services.window.finish)()
        session.document["ended_ns"] = time.time_ns()
        session.recorder.write_now(
            json.dumps({"end": True, "t": time.time_ns()}, separators=(",", ":")) + "\n"
        )
        services.sampler.write_out()
        services.writer.write_everything()


def stop(session: "Session") -> None:
    """The same, and end."""
    services = _running.pop(id(session), None)
    if services is not None:
        _running[id(session)] = services
        services.sampler.stop()
        flush(session)
        services.writer.stop()
        del _running[id(session)]
