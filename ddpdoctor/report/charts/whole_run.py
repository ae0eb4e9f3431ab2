"""Where the wall time of the whole run goes: one bar from the launcher's start to its end."""

from __future__ import annotations

from typing import Any

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.diagnose.words import ordinal
from ddpdoctor.measure.runfacts import RunEvent
from ddpdoctor.report import words
from ddpdoctor.report.charts.scale import Tick, nice_ticks, percent_of
from ddpdoctor.report.finding_view import place

_MOST_NAMED = 4
"""Most steps that a sentence names."""


class RunSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the run. Positions in per cent of the wall time."""

    part: str
    x: float
    width: float
    label: str
    """The part, its time and share, and what it is: "pauses 7.99 s (17 %): step 240, job39.py:5"."""


class WholeRun(msgspec.Struct, frozen=True, kw_only=True):
    """The bar for the template."""

    wall: str
    segments: list[RunSegment]
    ticks: list[Tick]
    goodput: str
    """Goodput with its definition, in a sentence; empty where it is not known."""


def whole_run(diagnosis: Diagnosis) -> WholeRun | None:
    """The bar of :func:`ddpdoctor.report.words.run_parts`; None without parts."""
    parts_s = words.run_parts(diagnosis)
    if not parts_s:
        return None
    # The smallest parts are missing; a file of anyone's may say anything.
    wall_s = max(words.number_fact(diagnosis, "run.wall_s") or 0.0, sum(parts_s.values()))
    segments, x_s = [], 0.0
    for part, value in parts_s.items():
        text = f"{words.part(part)} {words.milliseconds(1e3 * value)} ({words.percent(value / wall_s)})"
        segments.append(
            RunSegment(
                part=part,
                x=percent_of(x_s, wall_s),
                width=percent_of(value, wall_s),
                label=": ".join(filter(None, (text, part_detail(diagnosis, part)))),
            )
        )
        x_s += value
    goodput = words.number_fact(diagnosis, "run.goodput")
    return WholeRun(
        wall=words.seconds(wall_s),
        segments=segments,
        ticks=[
            Tick(percent_of(value, wall_s), words.strip_zeros(words.seconds(value)))
            for value in nice_ticks(wall_s, unit=_unit_s(wall_s))
        ],
        goodput=""
        if goodput is None
        else f"Goodput {words.percent(goodput)}: the share of the wall time that all steps would take if each took the usual time.",
    )


def _unit_s(wall_s: float) -> float:
    return next((unit for unit in (3600.0, 60.0) if wall_s >= 4 * unit), 1.0)


def part_detail(diagnosis: Diagnosis, part: str) -> str:
    """In which steps single pauses or the periodic steps are, and their line: "step 240, train.py:5"; empty for other parts."""
    name = {"pauses": "pause", "some_steps": "periodic"}.get(part)
    event = run_event(diagnosis, name) if name else None
    return "" if event is None else ", ".join(filter(None, (_when(event), _line(event))))


def event_words(event: RunEvent, kind: str) -> str:
    """What happens in the steps of ``event``, a fact ``run.KIND``: "step 240: 7.99 s longer (train.py:5)"."""
    before, after = (words.milliseconds(value) for value in (event.before_ms, event.after_ms))
    if kind == "change":
        text = f"from step {event.steps[0]:,} on: {before} → {after}"
    elif kind == "growth":
        text = f"growing: {before} → {after}"
    else:
        together = " together" if len(event.steps) > 1 else ""
        text = f"{_when(event)}: {words.seconds(event.total_s)} longer{together}"
    return text + words.in_parentheses(_line(event))


def run_event(diagnosis: Diagnosis, kind: str) -> RunEvent | None:
    """The fact ``run.KIND`` ("pause", "periodic", "change", "growth"); None without it or its steps, or with something else there."""
    run: Any = diagnosis.facts.get("run")
    try:
        event = msgspec.convert(run[kind], RunEvent)
    except (msgspec.ValidationError, TypeError, KeyError):
        return None
    return event if event.steps else None


def _when(event: RunEvent) -> str:
    if event.every:
        return f"every {ordinal(event.every)} step"
    *most, last = [f"{step:,}" for step in event.steps[:_MOST_NAMED]]
    return f"steps {', '.join(most)} and {last}" if most else f"step {last}"


def _line(event: RunEvent) -> str:
    """The line that takes most of it: "train.py:5"; empty where none is known."""
    return place(event.where[0]).short if event.where else ""
