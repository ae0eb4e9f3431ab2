"""One frame of ``ddpdoctor watch``: the recording so far, drawn with rich."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ddpdoctor.cli.rank_answers import STOPPED
from ddpdoctor.cli.watch_ranks import (
    MOST_ROWS,
    LineOfCode,
    Sort,
    View,
    innermost,
    percent,
    phase_bar,
    plain_table,
    rank_table,
    size,
    whole_seconds,
)
from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.plain import plain
from ddpdoctor.report import words
from ddpdoctor.report.summary import cost_sentence
from ddpdoctor.rundir import Standstill, read_stops
from ddpdoctor.rundir.ends import job_end
from ddpdoctor.rundir.packages import innermost_frame, says_gil_is_held
from ddpdoctor.rundir.stops import RankStop, launches_of
from ddpdoctor.telemetry import RECENT_STEPS, LiveRun, run_so_far, step_ms

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
    """The whole view, top to bottom. ``now``: current phase and line by rank of this host. ``keys``: whether keys work."""
    view = view or View()
    # The view is cut at the bottom if it does not fit the terminal.
    hint_text = f"q quit · s sort (by {view.sort.value}) · r reverse · p phases"
    hint = [Text(hint_text, style="dim")] if keys else []
    parts: list[RenderableType] = [
        _state(run),
        *hint,
        *_stall_lines(run, now or {}),
        _verdict(verdict, run.over),
    ]
    if run.ranks:
        parts += [Text(""), _pace(run), *_whole_run(run), *_sparkline(run), *phase_bar(run), Text("")]
        parts.append(rank_table(run, view, now or {}))
        more = len(run.ranks) - MOST_ROWS
        if more > 0:
            others = "that are less late" if view.sort in (Sort.RANK, Sort.LATE) else "more"
            parts.append(Text(f"and {words.count(more, 'rank')} {others}", style="dim"))
        if len({live.host for live in run.ranks.values()}) > 1:
            parts.append(Text("lateness across hosts: clocks aligned at the ends of the steps", style="dim"))
    gpus = _gpu_table(run)
    if gpus is not None:
        parts += [Text(""), gpus]
    return Group(*parts)


def _state(run: LiveRun) -> Text:
    manifest = run.manifest
    started = manifest.get("started_ns")
    ended = manifest.get("ended_ns")
    # If the clock was set back, the end may be before the start.
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
    """How long no rank has finished a step, if that is unusually long; then stopped ranks, and the ranks' answers to the monitor."""
    stalled_s = run.long_silence_s()
    if stalled_s is None:
        return []
    found: list[RenderableType] = [
        Text(f"no rank has finished a step for {whole_seconds(stalled_s)}", style="bold red")
    ]
    stopped = sorted(rank for rank, document in now.items() if document.get("phase") == STOPPED)
    found += [Text(f"rank {rank} is {STOPPED}", style="red") for rank in stopped[:MOST_ROWS]]
    stops = read_stops(str(run.path), [])
    stalls = [
        host.stall for host in stops.hosts if host.stall and host.stall.get("state") == Standstill.LASTS
    ]
    answers = [
        rank for stall in stalls for rank in stall.get("ranks") or [] if rank.get("rank") not in stopped
    ]
    for each in answers[:MOST_ROWS]:
        newest = {stop.rank: stop for stop in sorted(stops.ranks, key=lambda stop: stop.repeat)}
        stop = newest.get(each.get("rank", -1))
        place = _place(run, stop) if stop else ()
        state = "is stuck" if each.get("answered") else "does not answer"
        state = next((verb for verb in ("waits", "computes") if each.get(verb)), state)
        style = "dim" if each.get("waits") else "red"
        at, function = (" at ", f" ({place[2]})") if place else ("", "")
        found.append(LineOfCode(f"rank {each.get('rank')} {state}{at}", place, function, style))
    return found


def _place(run: LiveRun, stop: RankStop) -> Sequence[Any]:
    """The frame of the user's program in which a rank is in its current step; () if unknown."""
    if says_gil_is_held(stop.faults):
        return innermost_frame(stop.faults) or ()
    documents = [
        document
        for document in (stop.standing, stop.progress)
        if document and run.is_current_position(stop.rank, document)
    ]
    return innermost(documents[0]) if documents else ()


def _verdict(verdict: LiveVerdict, over: bool) -> Text:
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


def _pace(run: LiveRun) -> Text:
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


def _whole_run(run: LiveRun) -> list[Text]:
    """Where the wall time went so far."""
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
    """Step times of the slowest rank in each step, oldest to newest; bars start at zero."""
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
    """The GPUs of all hosts; None without values from NVML."""
    table = plain_table("GPU", "host", "utilisation", "memory used", "power", "temperature")
    for host, sample in sorted(run.samples.items()):
        for gpu in sample.get("gpus") or []:
            if table.row_count >= MOST_ROWS:
                return table
            power, temperature = gpu.get("power_watts"), gpu.get("temperature_celsius")
            table.add_row(
                str(gpu.get("index")),
                Text(plain(host)),
                percent(gpu.get("gpu_utilization_percent")),
                size(gpu.get("memory_used_bytes")),
                "–" if power is None else f"{power:.0f} W",
                "–" if temperature is None else f"{temperature:.0f} °C",
            )
    return table if table.row_count else None
