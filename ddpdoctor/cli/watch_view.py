"""One frame of ``ddpdoctor watch``: what was recorded so far, as rich draws it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.plain import plain
from ddpdoctor.report import words
from ddpdoctor.report.view import price
from ddpdoctor.rundir import Standstill, read_stops
from ddpdoctor.telemetry import LiveRun, data_wait_ms, step_ms

RECENT_STEPS = 20
"""Newest steps over which medians are taken."""
MOST_ROWS = 16
"""Most ranks shown: those that come last."""
SPARK_STEPS = 50
SPARKS = "▁▂▃▄▅▆▇█"
SILENT_S, SILENT_STEPS = 10.0, 10
"""Without a step for so long, and so many steps' time, a job deserves a look, whatever it does."""
LATE_SHARE = 0.05
"""Lateness of a rank above this share of the step stands out: what makes a finding a warning."""


@dataclass(frozen=True)
class Opinion:
    """What the analysis says so far."""

    headline: str
    price: str = ""
    healthy: bool | None = None
    steps: int = 0
    moment_s: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, diagnosis: Diagnosis) -> Opinion:
        """The verdict of a diagnosis and its price."""
        return cls(diagnosis.verdict.headline, price(diagnosis), diagnosis.healthy, diagnosis.steps.measured)


def frame(run: LiveRun, opinion: Opinion, *, gone: bool = False) -> RenderableType:
    """Everything to show, top to bottom; ``gone``: the launcher was killed, so nothing more will come."""
    parts: list[RenderableType] = [_state(run, gone), *_silence(run), _verdict(opinion, run.ended or gone)]
    if run.ranks:
        parts += [Text(""), _pace(run), *_sparkline(run), Text(""), _rank_table(run)]
        more = len(run.ranks) - MOST_ROWS
        if more > 0:
            parts.append(Text(f"and {words.count(more, 'rank')} that come earlier", style="dim"))
        if len({live.host for live in run.ranks.values()}) > 1:
            parts.append(Text("lateness across hosts: clocks set by the ends of the steps", style="dim"))
    gpus = _gpu_table(run)
    if gpus is not None:
        parts += [Text(""), gpus]
    return Group(*parts)


def _state(run: LiveRun, gone: bool) -> Text:
    manifest = run.manifest
    started = manifest.get("started_ns")
    ended = manifest.get("ended_ns")
    # A clock that was set back in between may show an end before the beginning.
    lasted = _whole_seconds(max(0, (ended or time.time_ns()) - started) / 1e9) if started else ""
    if gone:
        state = "its launcher was killed"
    elif ended:
        outcome = (
            f"signal {manifest['signal']}"
            if manifest.get("signal")
            else f"exit code {manifest.get('exit_code')}"
        )
        state = f"ended after {lasted}, {outcome}"
    else:
        state = f"running for {lasted}" if lasted else "running"
    return Text.assemble((plain(str(run.path)), "bold"), f"  {state}")


def _silence(run: LiveRun) -> list[Text]:
    """How long no rank has finished a step, where that is long for this job; and who does not wait, once they were asked."""
    silent_s = run.silent_s()
    times = [ms for live in run.ranks.values() if (ms := step_ms(live, RECENT_STEPS)) is not None]
    if silent_s is None or silent_s < max(SILENT_S, SILENT_STEPS * max(times, default=0.0) / 1e3):
        return []
    found = [Text(f"no rank has finished a step for {_whole_seconds(silent_s)}", style="bold red")]
    stops = read_stops(str(run.path), [])
    lasting = [
        host.stall for host in stops.hosts if host.stall and host.stall.get("state") == Standstill.LASTS
    ]
    for each in [rank for stall in lasting for rank in stall.get("ranks") or []][:MOST_ROWS]:
        stop = next((stop for stop in stops.ranks if stop.rank == each.get("rank")), None)
        document = (stop.standing or stop.progress or {}) if stop else {}
        place = next(iter(document.get("user") or document.get("frames") or []), None)
        where = f" at {place[0]}:{place[1]} ({place[2]})" if place and len(place) == 3 else ""
        does = "waits" if each.get("waits") else "stands" if each.get("answered") else "does not answer"
        found.append(
            Text(plain(f"rank {each.get('rank')} {does}{where}"), style="dim" if each.get("waits") else "red")
        )
    return found


def _whole_seconds(duration_s: float) -> str:
    return words.seconds(duration_s) if duration_s >= 60 else f"{duration_s:.0f} s"


def _verdict(opinion: Opinion, over: bool) -> Text:
    style = {True: "bold green", False: "bold red", None: "dim"}[opinion.healthy]
    text = Text(plain(opinion.headline), style=style)
    if opinion.price:
        text.append(f"\n{opinion.price}", style="default not bold")
    if opinion.healthy is not None and not over:
        age = _whole_seconds(time.monotonic() - opinion.moment_s)
        text.append(
            f"\nverdict so far, from {words.count(opinion.steps, 'step')}, {age} ago", style="dim not bold"
        )
    return text


def _pace(run: LiveRun) -> Text:
    times = [ms for live in run.ranks.values() if (ms := step_ms(live, RECENT_STEPS)) is not None]
    pieces = [
        words.count(len(run.ranks), "rank"),
        f"{words.count(min(live.steps_total for live in run.ranks.values()), 'step')} done",
    ]
    if times:
        pieces.append(f"{words.milliseconds(statistics.median(times))} a step")
    rate = run.samples_per_s(RECENT_STEPS)
    if rate is not None:
        pieces.append(f"{words.significant(rate)} samples/s")
    return Text(" · ".join(pieces) + f"   (newest {RECENT_STEPS} steps)" * bool(times))


def _sparkline(run: LiveRun) -> list[Text]:
    """Step times of the slowest rank at each step, oldest to newest, from zero."""
    longest: dict[int, float] = {}
    for live in run.ranks.values():
        for step in live.recent(SPARK_STEPS):
            longest[step.number] = max(longest.get(step.number, 0.0), step.duration_ms)
    values = [longest[number] for number in sorted(longest)][-SPARK_STEPS:]
    if len(values) < 2:
        return []
    top = max(values)
    bars = "".join(SPARKS[min(int(value / top * len(SPARKS)), len(SPARKS) - 1)] for value in values)
    return [Text.assemble((bars, "blue"), (f"  up to {words.milliseconds(top)} a step", "dim"))]


def _rank_table(run: LiveRun) -> Table:
    table = _table("rank", "host", "step", "step time", "late by", "waits for data", "CPU", "memory")
    late = run.lateness_ms(RECENT_STEPS)
    order = sorted(run.ranks.values(), key=lambda live: -late.get(live.rank, 0.0))[:MOST_ROWS]
    for live in sorted(order, key=lambda live: live.rank):
        whole, behind = step_ms(live, RECENT_STEPS), late.get(live.rank)
        sticks_out = behind is not None and whole is not None and behind > LATE_SHARE * whole
        # What a rank used while it was dying is of no use.
        sample = {} if run.ended else run.samples.get(live.host, {})
        used = (sample.get("ranks") or {}).get(str(live.rank)) or {}
        table.add_row(
            str(live.rank),
            Text(plain(live.host) or "?"),
            f"{live.steps_total - 1:,}" if live.steps else "none yet",
            _ms(whole),
            Text(_ms(behind if behind is None else max(behind, 0.0)), style="bold red" if sticks_out else ""),
            _ms(data_wait_ms(live, RECENT_STEPS)),
            _percent(used.get("cpu_percent")),
            _bytes(used.get("rss_bytes")),
        )
    return table


def _gpu_table(run: LiveRun) -> Table | None:
    """The hosts' GPUs; None where NVML gave none."""
    table = _table("GPU", "host", "utilisation", "memory used", "power", "temperature")
    for host, sample in sorted(run.samples.items()):
        for gpu in sample.get("gpus") or []:
            if table.row_count >= MOST_ROWS:
                return table
            power, heat = gpu.get("power_watts"), gpu.get("temperature_celsius")
            table.add_row(
                str(gpu.get("index")),
                Text(plain(host)),
                _percent(gpu.get("gpu_utilization_percent")),
                _bytes(gpu.get("memory_used_bytes")),
                "–" if power is None else f"{power:.0f} W",
                "–" if heat is None else f"{heat:.0f} °C",
            )
    return table if table.row_count else None


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, justify="left" if name == "host" else "right", no_wrap=name != "host")
    return table


def _ms(value: float | None) -> str:
    return "–" if value is None else words.milliseconds(value)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} %"


def _bytes(value: float | None) -> str:
    return "–" if value is None else words.size(value)
