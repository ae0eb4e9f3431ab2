"""The analysis of a run while its job hangs, in a process that may be left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from ddpdoctor.launch.patience import hold_no_streams, leave, prefer_for_oom_kill
from ddpdoctor.parentdeath import die_with_parent
from ddpdoctor.readable import is_readable

_MOST_S = 600.0
"""As much as the analysis at the end of a short job may take."""
_NICENESS = 10
"""Added to that of the process that starts it."""
_MOST_BYTES = 1 << 14
"""Of its answer, a sentence; a pipe holds more, so that nobody waits for the other."""


class Diagnosing:
    """For a process that waits for several things at once."""

    def __init__(self, diagnose: Callable[[], str]) -> None:
        """``diagnose`` returns a sentence for the user, and says itself what went wrong."""
        self._diagnose = diagnose
        self._pid, self._reader = 0, -1
        self._deadline_s = 0.0

    @property
    def handles(self) -> list[int]:
        """Readable once there is something to say."""
        return [self._reader] if self._reader >= 0 else []

    def start(self) -> None:
        """Start it; the last one, if it still runs, is about a hang that is over."""
        self.leave()
        reader, writer = os.pipe()
        parent = os.getpid()
        try:
            self._pid = os.fork()
        except OSError:  # no further process is allowed
            os.close(reader)
            os.close(writer)
            return
        if self._pid == 0:
            try:
                die_with_parent(signal.SIGKILL)
                hold_no_streams([writer])
                os.nice(_NICENESS)
                prefer_for_oom_kill()
                if os.getppid() == parent:
                    os.write(writer, self._diagnose().encode()[:_MOST_BYTES])
            finally:
                os._exit(0)
        os.close(writer)
        self._reader, self._deadline_s = reader, time.monotonic() + _MOST_S

    def sentence(self) -> str | None:
        """What it has to say; None where nothing yet, or nothing at all."""
        if self._reader < 0:
            return None
        if is_readable(self._reader, 0):
            text = os.read(self._reader, _MOST_BYTES).decode(errors="replace")
            self.leave()
            return text or None
        if time.monotonic() > self._deadline_s:
            self.leave()
        return None

    def leave(self) -> None:
        """End it, without waiting for that."""
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1
            leave(self._pid)
