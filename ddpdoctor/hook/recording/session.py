"""The recording of one rank, and the state of its job."""

from __future__ import annotations

import os
from threading import get_ident
from types import CodeType
from typing import Any, Callable

from ...rundir import id_of_root
from ...rundir.spool import Spool
from ..job import CodeKinds, Loaders, Models, NumberedWeakMap, Roles
from .active import active
from .crash_records import Call
from .devices import devices_of
from .recorder import Recorder
from .steps import Stepping
from .writer import Writer

END_BUDGET_S = 2.0
"""Total seconds that the job's end waits for the recording. The launcher copies the rest from the spool."""
LAST_SETTINGS_STEP = 3
"""By this step DDP has rebuilt its buckets (at its second forward), so its settings can be read."""


class Backward:
    """The outermost backward in progress on the training thread, and the call of the last one that reduced gradients: the next one
    is usually called from the same line and reduces the same model."""

    __slots__ = ("at", "call", "code", "depth", "frames", "lines", "model", "recorder", "steps_optimizer")

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.depth = 0
        self.steps_optimizer = False
        """Whether an optimizer stepped inside it."""
        self.frames = 1
        """Number of frames from the wrapper of backwards to the frame that called the last one; with the next four, set by that
        wrapper."""
        self.code: CodeType | None = None
        """The code of that frame."""
        self.at = -1
        """The index of that frame's instruction."""
        self.call: Call | None = None
        self.model: Callable[[], Any] = lambda: None
        """Returns the DDP module whose gradients it reduced (held weakly)."""
        self.lines: dict[tuple[int, ...], tuple[str, CodeType, CodeType]] = {}
        """The field with the source line, by place. Keeping the code objects prevents reuse of their ids."""


class Session:
    """The recording of one rank, from ``arm`` until its end."""

    def __init__(self, rank: int, world_size: int, run: str, spool: Spool) -> None:
        """``run`` is the run directory, ``spool`` the rank's spool."""
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
        self.backward, self.models, self.loaders = Backward(self.recorder), Models(), Loaders()
        self.optimizers: NumberedWeakMap[int] = NumberedWeakMap()
        self.roles = Roles()
        """Roles of the optimizers."""
        self.thread_is_known = False
        """Whether an optimizer has stepped, which identifies the training thread."""
        self.writer = Writer(self)
        self.services: Any = None
        """The helpers of the session, a ``lifetime.Services``; None before its start and after its end."""
        self.end_budget_s = END_BUDGET_S
        """Remaining seconds that the job's end may wait for the recording."""

    def begin(self) -> None:
        """Start copying to the run directory. Raises OSError, and removes the spool, if the directory is another run's or proves
        not writable."""
        try:
            self.writer.start()
        except OSError:
            active.stop()
            self.recorder.close()
            raise

    def follow_training_thread(self) -> None:
        """Record the calling thread, because it steps the optimizer."""
        self.thread_is_known = True
        if self.recorder.thread != get_ident():
            self.recorder.switch_to_this_thread()
