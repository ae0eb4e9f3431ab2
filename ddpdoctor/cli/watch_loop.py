"""The loop of ``ddpdoctor watch``: read the run, analyse it in a thread, draw it."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from ddpdoctor.analysis import analyze
from ddpdoctor.cli.keys import Keys, keys
from ddpdoctor.cli.project_config import configured
from ddpdoctor.cli.rank_answers import STOPPED, is_stopped
from ddpdoctor.cli.watch_metrics import serve_findings
from ddpdoctor.cli.watch_ranks import View
from ddpdoctor.cli.watch_view import LiveVerdict, frame
from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.rundir import present_ranks, recover
from ddpdoctor.telemetry import LiveRun

MIN_PAUSE_S = 5.0
PAUSE_FACTOR = 10.0
"""The pause after an analysis is at least ten times its duration, so that the analyses take at most a tenth of a core."""


def watch(run: Path, interval_s: float, *, once: bool, address: tuple[str, int] | None = None) -> None:
    """Show ``run`` until its job has ended, or ``once``, and serve its findings on ``address`` meanwhile."""
    watched = WatchedRun(run)
    watched.refresh()
    console = Console()
    if once or watched.over:
        watched.analyze()
        watched.refresh()  # the analysis takes seconds, in which the ranks make progress
        console.print(watched.frame())
        return
    os.nice(19)
    try:
        with ExitStack() as at_end:
            if address is not None:
                at_end.callback(serve_findings(address, lambda: watched.newest))
            keyboard = at_end.enter_context(keys())
            _follow(watched, console, interval_s, keyboard)
    except KeyboardInterrupt:
        return


def _follow(watched: WatchedRun, console: Console, interval_s: float, keyboard: Keys) -> None:
    threading.Thread(target=watched.analyze_repeatedly, daemon=True).start()
    if not console.is_terminal:
        while not watched.over:
            console.print(watched.frame())
            time.sleep(interval_s)
            watched.refresh()
        watched.analyze()
        console.print(watched.frame())
        return
    watched.keys = keyboard.enabled
    with Live(watched.frame(), console=console, auto_refresh=False) as live:
        next_s = time.monotonic() + interval_s
        while not watched.over:
            if watched.view.handle_key(keyboard.wait(max(0.0, next_s - time.monotonic()))):
                return
            if time.monotonic() >= next_s:
                watched.refresh()
                next_s = time.monotonic() + interval_s
            live.update(watched.frame(), refresh=True)
        watched.keys = False
        watched.analyze()
        live.update(watched.frame(), refresh=True)


class WatchedRun:
    """A run that is watched, with its newest verdict."""

    def __init__(self, path: Path) -> None:
        """Raises DdpDoctorError if the configuration or its rules cannot be read."""
        self._options = configured(jobs=1)
        self._path, self._live = path, LiveRun(path)
        self._verdict = LiveVerdict("no verdict yet: the first analysis is running")
        self.newest: tuple[Diagnosis | None, float] = None, time.monotonic()
        """The newest diagnosis, None without one, and when it was made, monotonic, s."""
        self._now: dict[int, dict[str, Any]] = {}
        self.view = View()
        """Order and columns of the table of ranks."""
        self.keys = False
        """Whether keys work; then the view lists them."""

    def refresh(self) -> None:
        """Read what the ranks have recorded since the last refresh."""
        recover(str(self._path))
        self._live.look()
        self._now = {}
        for each in present_ranks(str(self._path)):
            progress = each.progress
            if progress is not None and self._live.is_current_position(each.rank, progress):
                self._now[each.rank] = progress
            if is_stopped(each):
                self._now[each.rank] = {**self._now.get(each.rank, {}), "phase": STOPPED}

    @property
    def over(self) -> bool:
        """Whether the recording is complete: the job ended, or was killed with its launcher."""
        return self._live.over

    def analyze(self) -> None:
        """Analyse the recording so far. Errors become the verdict's text, because they may disappear with the next steps."""
        try:
            diagnosis = analyze([str(self._path)], self._options)
        except DdpDoctorError as error:
            no_steps = "no verdict yet: no rank has recorded a step"
            self._verdict = LiveVerdict(f"no verdict: {error}" if self.over else no_steps)
        except Exception as error:
            self._verdict = LiveVerdict(f"no verdict yet ({type(error).__name__}: {error})")
        else:
            self._verdict = LiveVerdict.of(diagnosis)
            self.newest = diagnosis, time.monotonic()

    def analyze_repeatedly(self) -> None:
        """Analyse repeatedly, with pauses, in its own thread."""
        while True:
            began_s = time.monotonic()
            self.analyze()
            time.sleep(max(MIN_PAUSE_S, PAUSE_FACTOR * (time.monotonic() - began_s)))

    def frame(self) -> RenderableType:
        """The view after the last refresh."""
        return frame(self._live, self._verdict, now=self._now, view=self.view, keys=self.keys)
