"""The recording of one rank, and the state of its job."""

from __future__ import annotations

import os
from threading import get_ident
from types import CodeType
from typing import Any

from ...rundir import Spool, id_of_root
from ..job import CodeKinds, Loaders, Models, NumberedWeakMap, Roles
from .active import active
from .devices import devices_of
from .recorder import Recorder
from .steps import Stepping
from .writer import Writer

PATIENCE_S = 2.0
"""Seconds that the job's end waits for the recording in all; the spool keeps what was not copied by then, and the
launcher copies it."""
LAST_SETTINGS_STEP = 3
"""By this step DDP has rebuilt its buckets, at its second forward, and its settings can be read."""


class Backward:
    """The backward in progress, outermost, on the training thread."""

    __slots__ = ("depth", "lines", "steps_optimizer", "usual")

    def __init__(self) -> None:
        self.depth = 0
        self.steps_optimizer = False
        """Whether an optimizer stepped inside it."""
        self.usual: Any = None
        """The last backward, for its wrapper; None before the first one."""
        self.lines: dict[tuple[int, ...], tuple[str, CodeType, CodeType]] = {}
        """The field with the source line, by place; with the code, so that no other gets its id."""


class Session:
    """The recording of one rank, from ``arm`` until its end."""

    def __init__(self, rank: int, world_size: int, run: str, spool: Spool) -> None:
        """``run`` is the run directory, ``spool`` the rank's."""
        self.rank, self.world_size = rank, world_size
        self.run, self.run_id = run, id_of_root(os.path.dirname(spool.directory))
        self.spool = spool
        self.joining_ns: int | None = None
        """When the process called ``init_process_group``, epoch ns; None without a process group."""
        self.document: dict[str, Any] = {}
        """The content of rank.json."""
        self.recorder = Recorder(self.spool, CodeKinds())
        self.stepping = Stepping(self.recorder)
        self.devices = devices_of(self.recorder)
        if self.devices is not None:
            self.stepping.at_every_step = self.devices.at_step
        self.backward, self.models, self.loaders = Backward(), Models(), Loaders()
        self.optimizers: NumberedWeakMap[int] = NumberedWeakMap()
        self.roles = Roles()
        """Of the optimizers."""
        self.thread_is_known = False
        """Whether an optimizer has stepped, which shows which thread trains."""
        self.writer = Writer(self)
        self.services: Any = None
        """The helpers of the session, see ``lifetime.Services``; None before its start and after its end."""
        self.patience_s = PATIENCE_S
        """Seconds left of the time that the job's end waits for the recording."""

    def begin(self) -> None:
        """Start copying to the run directory. Raises OSError if that is another run's by now or soon turns out not
        to be writable; the spool is gone then."""
        try:
            self.writer.start()
        except OSError:
            active.stop()
            self.recorder.close()
            raise

    def follow_training_thread(self) -> None:
        """The calling thread steps the optimizer: it is the one to record."""
        self.thread_is_known = True
        if self.recorder.thread != get_ident():
            self.recorder.switch_to_this_thread()
