"""A run under observation, for ``ddpdoctor watch``."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from ddpdoctor.analysis import analyze
from ddpdoctor.cli.configured import configured
from ddpdoctor.cli.watch_view import Opinion, frame
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.rundir import recover
from ddpdoctor.telemetry import LiveRun

LEAST_PAUSE_S = 5.0
PAUSE_FACTOR = 10.0
"""An analysis is followed by a pause of ten times its own length, so that watching takes a tenth of a core at
most, however long the run."""


def watch(run: Path, interval_s: float, *, once: bool) -> None:
    """Shows ``run`` until its job has ended, or ``once``."""
    watched = Watched(run)
    watched.look()
    console = Console()
    if once or watched.over:
        watched.think()
        console.print(watched.frame())
        return
    os.nice(19)
    try:
        _follow(watched, console, interval_s)
    except KeyboardInterrupt:
        return


def _follow(watched: Watched, console: Console, interval_s: float) -> None:
    threading.Thread(target=watched.keep_thinking, daemon=True).start()
    if not console.is_terminal:
        while not watched.over:
            console.print(watched.frame())
            time.sleep(interval_s)
            watched.look()
        watched.think()
        console.print(watched.frame())
        return
    with Live(watched.frame(), console=console, auto_refresh=False) as live:
        while not watched.over:
            time.sleep(interval_s)
            watched.look()
            live.update(watched.frame(), refresh=True)
        watched.think()
        live.update(watched.frame(), refresh=True)


class Watched:
    """A run under observation, with the newest opinion about it."""

    def __init__(self, path: Path) -> None:
        """Raises DdpDoctorError where the configuration or its rules cannot be read."""
        self._options = configured(jobs=1)
        self._path, self._live = path, LiveRun(path)
        self._opinion = Opinion("no verdict yet: the first look at the recording is under way")

    def look(self) -> None:
        """Read what the ranks have recorded since the last look."""
        recover(str(self._path))
        self._live.look()

    @property
    def over(self) -> bool:
        """Whether nothing more will be recorded: the job ended, or its launcher was killed."""
        return self._live.ended or self._launcher_is_gone()

    def _launcher_is_gone(self) -> bool:
        manifest = self._live.manifest
        pid = manifest.get("pid")
        if manifest.get("host") != socket.gethostname() or pid is None:
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False

    def think(self) -> None:
        """Analyse what there is; nothing is raised, because the job's next steps may mend it."""
        try:
            diagnosis = analyze([str(self._path)], self._options)
        except DdpDoctorError as error:
            none_yet = "no verdict yet: no rank has recorded a step so far"
            self._opinion = Opinion(f"no verdict: {error}" if self.over else none_yet)
        except Exception as error:
            self._opinion = Opinion(f"no verdict yet ({type(error).__name__}: {error})")
        else:
            self._opinion = Opinion.of(diagnosis)

    def keep_thinking(self) -> None:
        """Analyse again and again, with pauses; for a thread of its own."""
        while True:
            began_s = time.monotonic()
            self.think()
            time.sleep(max(LEAST_PAUSE_S, PAUSE_FACTOR * (time.monotonic() - began_s)))

    def frame(self) -> RenderableType:
        """The view as of the last look."""
        return frame(self._live, self._opinion, gone=not self._live.ended and self._launcher_is_gone())
