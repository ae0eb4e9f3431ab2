"""Draws one frame of ``ddpdoctor watch`` with rich: the recording so far and the table of ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ddpdoctor.cli.rank_requests import STOPPED
from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.plain import plain
from ddpdoctor.report import words
from ddpdoctor.report.console_output import plain_table
from ddpdoctor.report.summary import cost_sentence
from ddpdoctor.rundir.ends import job_end
from ddpdoctor.rundir.packages import innermost_frame, says_gil_is_held
from ddpdoctor.rundir.stops import RankStop, Standstill, launches_of, read_stops
from ddpdoctor.telemetry.live import (
    RECENT_STEPS,
    LivePhase,
    LiveRank,
    LiveRun,
    data_wait_ms,
    phase_shares,
    step_ms,
)
from ddpdoctor.telemetry.prometheus import run_so_far

SPARK_STEPS = 50
SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class LiveVerdict:
    """The verdict of the newest analysis, or why there is none."""

    headline: str
    cost: str = ""
    healthy: bool | None = None
    steps: int = 0
    created_s: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, diagnosis: Diagnosis) -> LiveVerdict:
        """The verdict of ``diagnosis`` with its cost."""
        return cls(
            diagnosis.verdict.headline, cost_sentence(diagnosis), diagnosis.healthy, diagnosis.steps.measured
        )


def frame(
    run: LiveRun,
    verdict: LiveVerdict,
    *,
    now: Mapping[int, Mapping[str, Any]] | None = None,
    view: View | None = None,
    keys: bool = False,
) -> RenderableType:
    """The complete view. ``now``: current phase and line of the ranks on this host. ``keys``: whether keys are read."""
    view = view or View()
    # The most important parts are first, because the view is cut at the bottom if it does not fit the terminal.
    hint_text = f"q quit · s sort (by {view.sort.value}) · r reverse · p phases"
    hint = [Text(hint_text, style="dim")] if keys else []
    parts: list[RenderableType] = [
        _state_line(run),
        *hint,
        *_stall_lines(run, now or {}),
        _verdict_text(verdict, run.over),
    ]
    if run.ranks:
        parts += [Text(""), _progress_line(run), *_run_line(run), *_sparkline(run), *phase_bar(run), Text("")]
        parts.append(rank_table(run, view, now or {}))
        more = len(run.ranks) - MAX_ROWS
        if more > 0:
            others = "that are less late" if view.sort in (Sort.RANK, Sort.LATE) else "more"
            parts.append(Text(f"and {words.count(more, 'rank')} {others}", style="dim"))
        if _has_several_hosts(run):
            parts.append(Text("lateness across hosts: clocks aligned at the ends of the steps", style="dim"))
    gpus = _gpu_table(run)
    if gpus is not None:
        parts += [Text(""), gpus]
    return Group(*parts)


def _state_line(run: LiveRun) -> Text:
    manifest = run.manifest
    started = manifest.get("started_ns")
    ended = manifest.get("ended_ns")
    # If the clock was set back, the end is before the start.
    duration = whole_seconds(max(0, (ended or time.time_ns()) - started) / 1e9) if started else ""
    if run.gone:
        state = "its launcher was killed, its ranks have ended"
    elif ended:
        job = job_end([manifest], launches_of(str(run.path), []))
        outcome = f"signal {job.signal}" if job.signal else f"exit code {job.code}"
        state = f"ended after {duration}, {outcome}"
    else:
        state = f"running for {duration}" if duration else "running"
    return Text.assemble((plain(str(run.path)), "bold"), f"  {state}")


def _stall_lines(run: LiveRun, now: Mapping[int, Mapping[str, Any]]) -> list[RenderableType]:
    """Time without a finished step, stopped ranks, and the ranks' answers to the monitor; [] if that time is not unusually long."""
    stalled_s = run.long_silence_s()
    if stalled_s is None:
        return []
    found: list[RenderableType] = [
        Text(f"no rank has finished a step for {whole_seconds(stalled_s)}", style="bold red")
    ]
    stopped = sorted(rank for rank, document in now.items() if document.get("phase") == STOPPED)
    found += [Text(f"rank {rank} is {STOPPED}", style="red") for rank in stopped[:MAX_ROWS]]
    stops = read_stops(str(run.path), [])
    stalls = [
        host.stall for host in stops.hosts if host.stall and host.stall.get("state") == Standstill.LASTS
    ]
    answers = [
        rank for stall in stalls for rank in stall.get("ranks") or [] if rank.get("rank") not in stopped
    ]
    for each in answers[:MAX_ROWS]:
        newest = {stop.rank: stop for stop in sorted(stops.ranks, key=lambda stop: stop.repeat)}
        stop = newest.get(each.get("rank", -1))
        place = _current_frame(run, stop) if stop else ()
        state = "is stuck" if each.get("answered") else "does not answer"
        state = next((verb for verb in ("waits", "computes") if each.get(verb)), state)
        style = "dim" if each.get("waits") else "red"
        at, function = (" at ", f" ({place[2]})") if place else ("", "")
        found.append(LineOfCode(f"rank {each.get('rank')} {state}{at}", place, function, style))
    return found


def _current_frame(run: LiveRun, stop: RankStop) -> Sequence[Any]:
    """The current frame of the user's program on a rank; () if unknown."""
    if says_gil_is_held(stop.faults):
        return innermost_frame(stop.faults) or ()
    documents = [
        document
        for document in (stop.standing, stop.progress)
        if document and run.is_current_position(stop.rank, document)
    ]
    return innermost(documents[0]) if documents else ()


def _verdict_text(verdict: LiveVerdict, over: bool) -> Text:
    style = {True: "bold green", False: "bold red", None: "dim"}[verdict.healthy]
    text = Text(plain(verdict.headline), style=style)
    if verdict.cost:
        text.append(f"\n{verdict.cost}", style="default not bold")
    if verdict.healthy is not None and not over:
        age = whole_seconds(time.monotonic() - verdict.created_s)
        text.append(
            f"\nverdict so far, from {words.count(verdict.steps, 'step')}, {age} ago", style="dim not bold"
        )
    return text


def _progress_line(run: LiveRun) -> Text:
    times = [ms for live in run.ranks.values() if (ms := step_ms(live, RECENT_STEPS)) is not None]
    restarts = max(live.restarts for live in run.ranks.values())
    pieces = [
        *([f"attempt {restarts + 1}, after {words.count(restarts, 'restart')}"] if restarts else []),
        words.count(len(run.ranks), "rank"),
        f"{words.count(min(live.steps_total for live in run.ranks.values()), 'step')} done",
    ]
    if times:
        pieces.append(f"{words.milliseconds(statistics.median(times))} per step")
    rate = run.samples_per_s(RECENT_STEPS)
    if rate is not None:
        pieces.append(f"{words.significant(rate)} samples/s")
    return Text(" · ".join(pieces) + f"   (newest {RECENT_STEPS} steps)" * bool(times))


def _run_line(run: LiveRun) -> list[Text]:
    """One line with the parts of the wall time so far; [] if unknown."""
    found = run_so_far(run)
    if found is None:
        return []
    parts = " + ".join(
        f"{words.part(part)} {whole_seconds(value)}" for part, value in found.parts_s.items() if value >= 0.5
    )
    so_far = "" if run.over else " so far"
    return [
        Text(f"run{so_far}: {whole_seconds(found.wall_s)} = {parts}; goodput {words.percent(found.goodput)}")
    ]


def _sparkline(run: LiveRun) -> list[Text]:
    """Sparkline of the longest step time over the ranks, by step. Bars start at zero."""
    longest: dict[int, float] = {}
    for live in run.ranks.values():
        for step in live.recent(SPARK_STEPS):
            longest[step.number] = max(longest.get(step.number, 0.0), step.duration_ms)
    values = [longest[number] for number in sorted(longest)][-SPARK_STEPS:]
    if len(values) < 2:
        return []
    top = max(values)
    bars = "".join(SPARKS[min(int(value / top * len(SPARKS)), len(SPARKS) - 1)] for value in values)
    return [Text.assemble((bars, "blue"), (f"  up to {words.milliseconds(top)} per step", "dim"))]


def _gpu_table(run: LiveRun) -> Table | None:
    """Table of the GPUs of all hosts; None without values from NVML."""
    table = _table_with_columns("GPU", "host", "utilization", "memory used", "power", "temperature")
    for host, sample in sorted(run.samples.items()):
        for gpu in sample.get("gpus") or []:
            if table.row_count >= MAX_ROWS:
                return table
            table.add_row(
                str(gpu.get("index")),
                Text(plain(host)),
                _value_or_dash(gpu.get("gpu_utilization_percent"), _percent),
                _value_or_dash(gpu.get("memory_used_bytes"), words.size),
                _value_or_dash(gpu.get("power_watts"), "{:.0f} W".format),
                _value_or_dash(gpu.get("temperature_celsius"), "{:.0f} °C".format),
            )
    return table if table.row_count else None


MAX_ROWS = 16
"""Maximum number of rows of a table."""
LATE_SHARE = 0.05
"""Lateness above this share of the step is highlighted. From the same share on, a finding is a warning."""
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
"""If the current step lasts longer, the view shows its duration so far."""


class Sort(str, Enum):
    """Order of the ranks."""

    RANK = "rank"
    """By rank number. If there are too many ranks, the latest ones are shown."""
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
        """Apply ``key``. Returns whether it ends the view."""
        if key == "s":
            order = list(Sort)
            self.sort = order[(order.index(self.sort) + 1) % len(order)]
        elif key == "r":
            self.reverse = not self.reverse
        elif key == "p":
            self.phases = not self.phases
        return key == "q"


def rank_table(run: LiveRun, view: View, now: Mapping[int, Mapping[str, Any]]) -> Table:
    """Table of the ranks in the order of the view. ``now``: documents with current phase and line, by rank of this host."""
    ranks = _sorted_ranks(run, view)
    return _phase_table(run, ranks) if view.phases else _time_table(run, ranks, now)


def _time_table(run: LiveRun, ranks: Sequence[LiveRank], now: Mapping[int, Mapping[str, Any]]) -> Table:
    has_several_hosts = _has_several_hosts(run)
    host = ["host"] if has_several_hosts else []
    table = _table_with_columns(
        "rank", *host, "step", "step time", "late by", "data wait", "CPU", "memory", "now"
    )
    for live in ranks:
        step_time_ms, late_ms = step_ms(live, RECENT_STEPS), run.lateness.by_rank_ms.get(live.rank)
        is_late = late_ms is not None and step_time_ms is not None and late_ms > LATE_SHARE * step_time_ms
        resources = _resources(run, live)
        table.add_row(
            str(live.rank),
            *_host_cell(live, has_several_hosts),
            f"{live.steps_total - 1:,}" if live.steps else "none yet",
            _value_or_dash(step_time_ms, words.milliseconds),
            Text(
                _value_or_dash(late_ms, lambda ms: words.milliseconds(max(ms, 0.0))),
                style="bold red" if is_late else "",
            ),
            _value_or_dash(data_wait_ms(live, RECENT_STEPS), words.milliseconds),
            _value_or_dash(resources.get("cpu_percent"), _percent),
            _value_or_dash(resources.get("rss_bytes"), words.size),
            _position(run, live, now.get(live.rank)),
        )
    return table


def _has_several_hosts(run: LiveRun) -> bool:
    return len({live.host for live in run.ranks.values()}) > 1


def _host_cell(live: LiveRank, has_several_hosts: bool) -> list[Text]:
    """The cell of the host column, which is shown only with several hosts."""
    return [Text(plain(live.host) or "?")] if has_several_hosts else []


def _phase_table(run: LiveRun, ranks: Sequence[LiveRank]) -> Table:
    has_several_hosts = _has_several_hosts(run)
    shares = {live.rank: phase_shares(live, RECENT_STEPS) for live in ranks}
    shown = [phase for phase in LivePhase if any(phase in each for each in shares.values())]
    table = _table_with_columns(
        "rank", *(["host"] if has_several_hosts else []), *(phase.value for phase in shown)
    )
    for live in ranks:
        cells = [
            _value_or_dash(shares[live.rank].get(phase), "{:.0%}".format).replace("%", " %")
            for phase in shown
        ]
        table.add_row(str(live.rank), *_host_cell(live, has_several_hosts), *cells)
    return table


def phase_bar(run: LiveRun) -> list[Text]:
    """Bar and legend of the phases of the training threads, mean over all ranks; [] without a complete step."""
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


def _sorted_ranks(run: LiveRun, view: View) -> list[LiveRank]:
    late = run.lateness.by_rank_ms
    found = sorted(run.ranks.values(), key=lambda live: live.rank)
    if view.sort is Sort.RANK:
        latest = sorted(found, key=lambda live: -late.get(live.rank, 0.0))[:MAX_ROWS]
        return sorted(latest, key=lambda live: live.rank, reverse=view.reverse)
    values = {live.rank: _sort_value(run, live, view.sort) for live in found}
    known = [live for live in found if values[live.rank] is not None]
    known.sort(key=lambda live: values[live.rank] or 0.0, reverse=not view.reverse)
    return [*known, *(live for live in found if values[live.rank] is None)][:MAX_ROWS]


def _sort_value(run: LiveRun, live: LiveRank, sort: Sort) -> float | None:
    if sort is Sort.LATE:
        return run.lateness.by_rank_ms.get(live.rank)
    if sort is Sort.STEP:
        return step_ms(live, RECENT_STEPS)
    if sort is Sort.DATA:
        return data_wait_ms(live, RECENT_STEPS)
    return _resources(run, live).get("rss_bytes")


def _resources(run: LiveRun, live: LiveRank) -> Mapping[str, Any]:
    """CPU and memory of the rank's process; {} after the end of the job, because its last values would be misleading."""
    sample = {} if run.over else run.samples.get(live.host, {})
    return (sample.get("ranks") or {}).get(str(live.rank)) or {}


class LineOfCode:
    """A text with a source line. In narrow columns the beginning of the path is cut off, never the line number."""

    def __init__(self, before: str, frame: Sequence[Any] = (), after: str = "", style: str = "") -> None:
        """``frame``: file, line and function. If its length is not three, only ``before`` and ``after`` are shown."""
        self._before, self._after, self._style = plain(before), plain(after), style
        self._path = plain(f"{frame[0]}:{frame[1]}") if len(frame) == 3 else ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        room = options.max_width - len(self._before) - len(self._after)
        if room < len(PurePath(self._path).name):
            room = options.max_width  # the path gets a line of its own
        yield Text(f"{self._before}{_shortened_path(self._path, room)}{self._after}", self._style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = len(self._before) + len(self._path) + len(self._after)
        return Measurement(1, width).with_maximum(options.max_width)


def _shortened_path(path: str, room: int) -> str:
    """``path`` in at most ``room`` characters, without its first folders or, if necessary, the beginning of its name."""
    if len(path) <= room:
        return path
    name, end = PurePath(path).name, path[-max(1, room - 1) :]
    if len(name) < len(end):
        return f"…{end[end.find('/') :]}"
    return name if len(name) <= room else f"…{end}"


def _position(run: LiveRun, live: LiveRank, progress: Mapping[str, Any] | None) -> LineOfCode:
    """The rank's current phase and line, and the duration of its step if it is long."""
    step_so_far_s = live.since_last_step_s()
    if run.over or live.ended:
        return LineOfCode("ended")
    duration_text = (
        f" for {whole_seconds(step_so_far_s)}"
        if step_so_far_s is not None and step_so_far_s >= _LONG_STEP_S
        else ""
    )
    if progress is None:
        return LineOfCode(f"in a step{duration_text}" if duration_text else "")
    file, *line = innermost(progress) or [""]
    phase = progress.get("phase") or "in a step"
    return LineOfCode(f"{phase} " if line else phase, [PurePath(str(file)).name, *line], duration_text)


def innermost(document: Mapping[str, Any]) -> Sequence[Any]:
    """The innermost frame of the user's program in a rank's document: file, line and function; () if there is none."""
    found = next(iter(document.get("user") or document.get("frames") or []), ())
    return found if len(found) == 3 else ()


def _table_with_columns(*names: str) -> Table:
    """An empty table with the columns ``names``. Numbers are right-aligned, text is left-aligned."""
    text_columns = ("host", "now")
    table = plain_table()
    for name in names:
        table.add_column(
            name, justify="left" if name in text_columns else "right", no_wrap=name not in text_columns
        )
    return table


def whole_seconds(duration_s: float) -> str:
    """A duration as text, rounded to seconds."""
    return words.seconds(duration_s) if duration_s >= 60 else f"{duration_s:.0f} s"


def _value_or_dash(value: float | None, show: Callable[[float], str]) -> str:
    """``value`` as text; a dash if it is unknown."""
    return "–" if value is None else show(value)


_percent = "{:.0f} %".format
