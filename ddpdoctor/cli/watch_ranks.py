"""The table of ranks of ``ddpdoctor watch``: step time, lateness, phases, resources and current line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ddpdoctor.plain import plain
from ddpdoctor.report import words
from ddpdoctor.telemetry import (
    RECENT_STEPS,
    LivePhase,
    LiveRank,
    LiveRun,
    data_wait_ms,
    phase_shares,
    step_ms,
)

MOST_ROWS = 16
"""Most rows of a table."""
LATE_SHARE = 0.05
"""Larger lateness, as a share of the step, is highlighted; the share from which a finding is a warning."""
BAR_WIDTH = 50
COLOURS = {
    LivePhase.DATA: "yellow",
    LivePhase.FORWARD: "green",
    LivePhase.BACKWARD: "blue",
    LivePhase.OPTIMIZER: "magenta",
    LivePhase.SYNC: "red",
    LivePhase.EVALUATION: "cyan",
    LivePhase.CHECKPOINT: "bright_red",
    LivePhase.OTHER: "bright_black",
}
_LONG_STEP_S = 1.5
"""For steps that last longer, the view shows how long the rank has been in the step."""


class Sort(str, Enum):
    """Order of the ranks."""

    RANK = "rank"
    """By number; of many ranks, the latest ones."""
    LATE = "lateness"
    STEP = "step time"
    DATA = "wait for data"
    MEMORY = "memory"


@dataclass
class View:
    """Order and columns of the table of ranks."""

    sort: Sort = Sort.RANK
    reverse: bool = False
    phases: bool = False
    """Show the phases of each rank instead of times and resources."""

    def handle_key(self, key: str) -> bool:
        """Apply ``key``; returns whether it ends the view."""
        if key == "s":
            order = list(Sort)
            self.sort = order[(order.index(self.sort) + 1) % len(order)]
        elif key == "r":
            self.reverse = not self.reverse
        elif key == "p":
            self.phases = not self.phases
        return key == "q"


def rank_table(run: LiveRun, view: View, now: Mapping[int, Mapping[str, Any]]) -> Table:
    """The ranks in the order of the view. ``now``: by rank of this host, the document with its current phase and line."""
    ranks = _ordered(run, view)
    return _phase_table(run, ranks) if view.phases else _time_table(run, ranks, now)


def _time_table(run: LiveRun, ranks: Sequence[LiveRank], now: Mapping[int, Mapping[str, Any]]) -> Table:
    has_several_hosts = _several_hosts(run)
    host = ["host"] if has_several_hosts else []
    table = plain_table("rank", *host, "step", "step time", "late by", "data wait", "CPU", "memory", "now")
    for live in ranks:
        step_time_ms, late_ms = step_ms(live, RECENT_STEPS), run.lateness.by_rank_ms.get(live.rank)
        is_late = late_ms is not None and step_time_ms is not None and late_ms > LATE_SHARE * step_time_ms
        resources = _resources(run, live)
        table.add_row(
            str(live.rank),
            *_host(live, has_several_hosts),
            f"{live.steps_total - 1:,}" if live.steps else "none yet",
            _ms(step_time_ms),
            Text(_ms(late_ms if late_ms is None else max(late_ms, 0.0)), style="bold red" if is_late else ""),
            _ms(data_wait_ms(live, RECENT_STEPS)),
            percent(resources.get("cpu_percent")),
            size(resources.get("rss_bytes")),
            _now(run, live, now.get(live.rank)),
        )
    return table


def _several_hosts(run: LiveRun) -> bool:
    return len({live.host for live in run.ranks.values()}) > 1


def _host(live: LiveRank, has_several_hosts: bool) -> list[Text]:
    """The cell of the host column, which is shown only with several hosts."""
    return [Text(plain(live.host) or "?")] if has_several_hosts else []


def _phase_table(run: LiveRun, ranks: Sequence[LiveRank]) -> Table:
    has_several_hosts = _several_hosts(run)
    shares = {live.rank: phase_shares(live, RECENT_STEPS) for live in ranks}
    shown = [phase for phase in LivePhase if any(phase in each for each in shares.values())]
    table = plain_table("rank", *(["host"] if has_several_hosts else []), *(phase.value for phase in shown))
    for live in ranks:
        cells = [percent(_times(shares[live.rank].get(phase), 100)) for phase in shown]
        table.add_row(str(live.rank), *_host(live, has_several_hosts), *cells)
    return table


def phase_bar(run: LiveRun) -> list[Text]:
    """Phases of the training threads, mean over all ranks, as a bar and a legend; [] without a complete step."""
    each = [shares for live in run.ranks.values() if (shares := phase_shares(live, RECENT_STEPS))]
    if not each:
        return []
    mean = {phase: sum(shares.get(phase, 0.0) for shares in each) / len(each) for phase in LivePhase}
    bar, legend = Text(), Text()
    drawn = 0
    for phase, share in mean.items():
        letters = round(share * BAR_WIDTH)
        letters = min(letters, BAR_WIDTH - drawn)
        drawn += letters
        bar.append("█" * letters, style=COLOURS[phase])
        if letters:
            legend.append("■ ", style=COLOURS[phase])
            legend.append(f"{phase.value} {share:.0%}  ".replace("%", " %"))
    return [bar, legend]


def _ordered(run: LiveRun, view: View) -> list[LiveRank]:
    late = run.lateness.by_rank_ms
    found = sorted(run.ranks.values(), key=lambda live: live.rank)
    if view.sort is Sort.RANK:
        last = sorted(found, key=lambda live: -late.get(live.rank, 0.0))[:MOST_ROWS]
        return sorted(last, key=lambda live: live.rank, reverse=view.reverse)
    values = {live.rank: _value(run, live, view.sort) for live in found}
    known = [live for live in found if values[live.rank] is not None]
    known.sort(key=lambda live: values[live.rank] or 0.0, reverse=not view.reverse)
    return [*known, *(live for live in found if values[live.rank] is None)][:MOST_ROWS]


def _value(run: LiveRun, live: LiveRank, sort: Sort) -> float | None:
    if sort is Sort.LATE:
        return run.lateness.by_rank_ms.get(live.rank)
    if sort is Sort.STEP:
        return step_ms(live, RECENT_STEPS)
    if sort is Sort.DATA:
        return data_wait_ms(live, RECENT_STEPS)
    return _resources(run, live).get("rss_bytes")


def _resources(run: LiveRun, live: LiveRank) -> Mapping[str, Any]:
    """CPU and memory of the rank's process; {} after the job's end, because values from then are misleading."""
    sample = {} if run.over else run.samples.get(live.host, {})
    return (sample.get("ranks") or {}).get(str(live.rank)) or {}


class LineOfCode:
    """A text with a source line. In narrow columns the path loses its beginning, never the line number."""

    def __init__(self, before: str, frame: Sequence[Any] = (), after: str = "", style: str = "") -> None:
        """``frame``: file, line and function; with another length only ``before`` and ``after`` are shown."""
        self._before, self._after, self._style = plain(before), plain(after), style
        self._path = plain(f"{frame[0]}:{frame[1]}") if len(frame) == 3 else ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        room = options.max_width - len(self._before) - len(self._after)
        if room < len(PurePath(self._path).name):
            room = options.max_width  # a line of its own
        yield Text(f"{self._before}{_shortened_path(self._path, room)}{self._after}", self._style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = len(self._before) + len(self._path) + len(self._after)
        return Measurement(1, width).with_maximum(options.max_width)


def _shortened_path(path: str, room: int) -> str:
    """``path`` in at most ``room`` characters, without its first folders, or the beginning of its name."""
    if len(path) <= room:
        return path
    name, end = PurePath(path).name, path[-max(1, room - 1) :]
    if len(name) < len(end):
        return f"…{end[end.find('/') :]}"
    return name if len(name) <= room else f"…{end}"


def _now(run: LiveRun, live: LiveRank, progress: Mapping[str, Any] | None) -> LineOfCode:
    """The rank's current phase and line, and how long its step has lasted if it is long."""
    since_s = live.since_last_step_s()
    if run.over or live.ended:
        return LineOfCode("ended")
    lasts = f" for {whole_seconds(since_s)}" if since_s is not None and since_s >= _LONG_STEP_S else ""
    if progress is None:
        return LineOfCode(f"in a step{lasts}" if lasts else "")
    file, *line = innermost(progress) or [""]
    phase = progress.get("phase") or "in a step"
    return LineOfCode(f"{phase} " if line else phase, [PurePath(str(file)).name, *line], lasts)


def innermost(document: Mapping[str, Any]) -> Sequence[Any]:
    """The innermost frame of the user's program in a rank's document: file, line and function; () if there is none."""
    found = next(iter(document.get("user") or document.get("frames") or []), ())
    return found if len(found) == 3 else ()


def plain_table(*names: str) -> Table:
    """A table without borders: numbers right-aligned, text left-aligned."""
    text_columns = ("host", "now")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(
            name, justify="left" if name in text_columns else "right", no_wrap=name not in text_columns
        )
    return table


def whole_seconds(duration_s: float) -> str:
    """A duration in whole seconds, or minutes and hours."""
    return words.seconds(duration_s) if duration_s >= 60 else f"{duration_s:.0f} s"


def percent(value: float | None) -> str:
    """``value`` in per cent; a dash if it is unknown."""
    return "–" if value is None else f"{value:.0f} %"


def size(value: float | None) -> str:
    """``value`` in bytes, with a unit; a dash if it is unknown."""
    return "–" if value is None else words.size(value)


def _ms(value: float | None) -> str:
    return "–" if value is None else words.milliseconds(value)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
