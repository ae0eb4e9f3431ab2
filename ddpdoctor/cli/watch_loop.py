"""The main loop of ``ddpdoctor watch``: reads a run, analyses it in a thread, and draws it."""

from __future__ import annotations

import os
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from ddpdoctor.analysis import analyze
from ddpdoctor.cli.rank_requests import STOPPED, is_stopped
from ddpdoctor.cli.session import configured
from ddpdoctor.cli.watch_view import LiveVerdict, View, frame
from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.process import is_readable
from ddpdoctor.rundir.draining import recover
from ddpdoctor.rundir.requests import present_ranks
from ddpdoctor.telemetry.live import LiveRun
from ddpdoctor.telemetry.prometheus import Sample, metrics_server, page_of

MIN_PAUSE_S = 5.0
PAUSE_FACTOR = 10.0
"""The pause after an analysis is at least ten times its duration, so that the analyses take at most a tenth of a core."""


def watch(run: Path, interval_s: float, *, once: bool, address: tuple[str, int] | None = None) -> None:
    """Show ``run`` until its job has ended, or only ``once``. Meanwhile serve its findings on ``address``, if given."""
    watched = WatchedRun(run)
    watched.refresh()
    console = Console()
    if once or watched.over:
        watched.analyze()
        watched.refresh()  # the ranks make progress during the analysis, which takes seconds
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
    """A watched run and its newest verdict."""

    def __init__(self, path: Path) -> None:
        """Raises DdpDoctorError if the configuration or its rules cannot be read."""
        self._options = configured(jobs=1)
        self._path, self._live = path, LiveRun(path)
        self._verdict = LiveVerdict("no verdict yet: the first analysis is running")
        self.newest: tuple[Diagnosis | None, float] = None, time.monotonic()
        """(Newest diagnosis or None, its time in monotonic seconds)."""
        self._now: dict[int, dict[str, Any]] = {}
        self.view = View()
        """Order and columns of the table of ranks."""
        self.keys = False
        """Whether keys are read, so that the view lists them."""

    def refresh(self) -> None:
        """Read the records of the ranks since the last refresh."""
        recover(str(self._path))
        self._live.update()
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
        """Analyse the recording so far. Errors are shown as the verdict, because they may disappear with the next steps."""
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
        """Analyse repeatedly with pauses; the body of a thread."""
        while True:
            began_s = time.monotonic()
            self.analyze()
            time.sleep(max(MIN_PAUSE_S, PAUSE_FACTOR * (time.monotonic() - began_s)))

    def frame(self) -> RenderableType:
        """The view after the last refresh."""
        return frame(self._live, self._verdict, now=self._now, view=self.view, keys=self.keys)


class Keys:
    """Key presses from the terminal; disabled if stdin is not a terminal or this process is in the background."""

    def __init__(self, handle: int | None) -> None:
        self._handle = handle

    @property
    def enabled(self) -> bool:
        """Whether keys have any effect."""
        return self._handle is not None

    def wait(self, seconds: float) -> str:
        """The key pressed within ``seconds``; "" for none."""
        if self._handle is None:
            time.sleep(seconds)
            return ""
        if not is_readable(self._handle, seconds):
            return ""
        # Special keys such as arrows send several bytes at once, whose letters must not count as keys.
        pressed = os.read(self._handle, 64)
        if not pressed:
            self._handle = None
        return pressed.decode(errors="replace") if len(pressed) == 1 else ""


@contextmanager
def keys() -> Iterator[Keys]:
    """Context in which single key presses are read. Restores the terminal at the end. Ctrl-C still interrupts."""
    try:
        handle = sys.stdin.fileno()
        # The kernel stops a background process that changes the terminal's settings.
        if os.tcgetpgrp(handle) != os.getpgrp():
            raise OSError
        before = termios.tcgetattr(handle)
        tty.setcbreak(handle)
    except (OSError, ValueError, AttributeError, termios.error):
        yield Keys(None)
        return
    try:
        yield Keys(handle)
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)


FINDING_METRICS: Mapping[str, str] = {
    "ddpdoctor_verdict_info": (
        "1 for the rule of the verdict: none for a healthy job, unknown if there is no verdict."
    ),
    "ddpdoctor_verdict_age_seconds": "Seconds since the analysis that found the verdict and the findings.",
    "ddpdoctor_finding_info": "1 for each finding of the newest analysis.",
    "ddpdoctor_finding_cost_seconds": "Time per step that each finding costs; if bound is at_most, it may cost nothing.",
}
"""Help text by metric. All but the age have the label ``rule``, ``finding_info`` also ``severity`` and ``rank``, the cost ``bound``."""


def rank_label(finding: Finding) -> str:
    """The rank, "all" or "several". A list of ranks would create a new time series for each set of ranks."""
    if finding.ranks is None:
        return "all"
    return str(finding.ranks[0]) if len(finding.ranks) == 1 else "several"


def findings_page(diagnosis: Diagnosis | None, age_s: float) -> str:
    """The metrics page of the newest diagnosis, or of None without one. ``age_s``: seconds since the diagnosis."""
    return page_of(FINDING_METRICS, _samples(diagnosis, age_s))


def _samples(diagnosis: Diagnosis | None, age_s: float) -> Iterator[Sample]:
    healthy = diagnosis is not None and diagnosis.healthy
    verdict = None if diagnosis is None else diagnosis.verdict.rule
    yield "ddpdoctor_verdict_info", {"rule": verdict or ("none" if healthy else "unknown")}, 1.0
    if diagnosis is None:
        return
    yield "ddpdoctor_verdict_age_seconds", {}, age_s
    for finding in diagnosis.findings:
        labels = {"rule": finding.rule, "severity": finding.severity, "rank": rank_label(finding)}
        yield "ddpdoctor_finding_info", labels, 1.0
        cost_ms = finding.costs_ms_per_step
        bound = "at_most" if finding.at_most else "estimate"
        yield (
            "ddpdoctor_finding_cost_seconds",
            {"rule": finding.rule, "bound": bound},
            None if cost_ms is None else cost_ms / 1000.0,
        )


def serve_findings(
    address: tuple[str, int], newest: Callable[[], tuple[Diagnosis | None, float]]
) -> Callable[[], None]:
    """Serve the findings page in a thread; returns a function that ends it. ``newest`` returns (diagnosis, its time in monotonic
    seconds). Raises DdpDoctorError if the address cannot be used."""

    def page() -> str:
        diagnosis, made_s = newest()
        return findings_page(diagnosis, time.monotonic() - made_s)

    try:
        scrapes = metrics_server(address, page)
    except (OSError, OverflowError) as error:
        raise DdpDoctorError(
            f"--prometheus: {address[0]}:{address[1]} cannot be served on: {error}."
        ) from error
    end_read, end_write = os.pipe()
    thread = threading.Thread(target=scrapes.serve, args=(end_read,), daemon=True)
    thread.start()

    def stop() -> None:
        os.close(end_write)
        thread.join()
        os.close(end_read)

    return stop
