"""A run under observation, for ``ddpdoctor watch``."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from ddpdoctor.analysis import analyze
from ddpdoctor.cli.keys import Keys, keys
from ddpdoctor.cli.project_config import configured
from ddpdoctor.cli.rank_answers import STOPPED, is_stopped
from ddpdoctor.cli.watch_ranks import View
from ddpdoctor.cli.watch_view import LiveVerdict, frame
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.rundir import present_ranks, recover
from ddpdoctor.telemetry import LiveRun

LEAST_PAUSE_S = 5.0
PAUSE_FACTOR = 10.0
"""An analysis is followed by a pause of ten times its own length, so that watching takes a tenth of a core at
most, however long the run."""


def watch(run: Path, interval_s: float, *, once: bool) -> None:
    """Shows ``run`` until its job has ended, or ``once``."""
    watched = WatchedRun(run)
    watched.refresh()
    console = Console()
    if once or watched.over:
        watched.analyze()
        watched.refresh()  # an analysis takes seconds, in which the ranks went on
        console.print(watched.frame())
        return
    os.nice(19)
    try:
        with keys() as pressed:
            _follow(watched, console, interval_s, pressed)
    except KeyboardInterrupt:
        return


def _follow(watched: WatchedRun, console: Console, interval_s: float, pressed: Keys) -> None:
    threading.Thread(target=watched.keep_analyzing, daemon=True).start()
    if not console.is_terminal:
        while not watched.over:
            console.print(watched.frame())
            time.sleep(interval_s)
            watched.refresh()
        watched.analyze()
        console.print(watched.frame())
        return
    watched.keys = pressed.enabled
    with Live(watched.frame(), console=console, auto_refresh=False) as live:
        next_s = time.monotonic() + interval_s
        while not watched.over:
            if watched.view.handle_key(pressed.wait(max(0.0, next_s - time.monotonic()))):
                return
            if time.monotonic() >= next_s:
                watched.refresh()
                next_s = time.monotonic() + interval_s
            live.update(watched.frame(), refresh=True)
        watched.keys = False
        watched.analyze()
        live.update(watched.frame(), refresh=True)


class WatchedRun:
    """A run under observation, with the newest opinion about it."""

    def __init__(self, path: Path) -> None:
        """Raises DdpDoctorError where the configuration or its rules cannot be read."""
        self._options = configured(jobs=1)
        self._path, self._live = path, LiveRun(path)
        self._opinion = LiveVerdict("no verdict yet: the first analysis is under way")
        self._now: dict[int, dict[str, Any]] = {}
        self.view = View()
        """How the user wants to see the ranks."""
        self.keys = False
        """Whether keys have an effect, and are told."""

    def refresh(self) -> None:
        """Read what the ranks have recorded since the last look."""
        recover(str(self._path))
        self._live.look()
        self._now = {}
        for each in present_ranks(str(self._path)):
            progress = each.progress
            if progress is not None and self._live.is_there(each.rank, progress):
                self._now[each.rank] = progress
            if is_stopped(each):
                self._now[each.rank] = {**self._now.get(each.rank, {}), "phase": STOPPED}

    @property
    def over(self) -> bool:
        """Whether nothing more will be recorded: the job ended, or was killed with its launcher."""
        return self._live.over

    def analyze(self) -> None:
        """Analyse what there is; nothing is raised, because the job's next steps may mend it."""
        try:
            diagnosis = analyze([str(self._path)], self._options)
        except DdpDoctorError as error:
            none_yet = "no verdict yet: no rank has recorded a step so far"
            self._opinion = LiveVerdict(f"no verdict: {error}" if self.over else none_yet)
        except Exception as error:
            self._opinion = LiveVerdict(f"no verdict yet ({type(error).__name__}: {error})")
        else:
            self._opinion = LiveVerdict.of(diagnosis)

    def keep_analyzing(self) -> None:
        """Analyse again and again, with pauses; for a thread of its own."""
        while True:
            began_s = time.monotonic()
            self.analyze()
            time.sleep(max(LEAST_PAUSE_S, PAUSE_FACTOR * (time.monotonic() - began_s)))

    def frame(self) -> RenderableType:
        """The view as of the last look."""
        return frame(self._live, self._opinion, now=self._now, view=self.view, keys=self.keys)
