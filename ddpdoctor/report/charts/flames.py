"""Flame graphs of stack samples: callers at the top, as wide as the time in them; late frames in the colours of lateness."""

from __future__ import annotations

from collections.abc import Sequence
from posixpath import basename

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, Flame, FlameFrame
from ddpdoctor.plain import plain
from ddpdoctor.report import words
from ddpdoctor.report.charts.scale import LEAST, Tick, nice_ticks, percent_of

GRAPHS = 3
"""Most drawn."""
FRAMES = 160
"""Most frames of one: the widest."""
ROW = 18
"""Pixels of a frame's height."""
LABELLED = 7.0
"""Per cent of the width from which on a frame has room for words."""
LETTERS_PER_CENT = 1.05
"""Letters that fit in a per cent of the width of a desk's page; the frame itself cuts off what is more."""
ROWS = 12
"""Lines of the table beside it."""
HEAT = (0.02, 0.05, 0.10, 0.20)
"""Parts of the step beyond the other graph's, from which on a frame is drawn hotter."""


class FlameBar(msgspec.Struct, frozen=True):
    """A frame: per cent along the width, pixels from the top."""

    x: float
    width: float
    y: int
    heat: int
    """0 for what takes no longer than elsewhere, to the number of ``HEAT``."""
    label: str
    """"" where there is no room."""
    title: str


class FlameChart(msgspec.Struct, frozen=True, kw_only=True):
    """One graph, ready to place."""

    title: str
    description: str
    height: int
    row: int
    bars: list[FlameBar]
    x_ticks: list[Tick]
    rows: list[tuple[str, str, str]]
    """The lines with most time in themselves and below: line, ms per step, beyond the other graph."""
    compared: bool


def flames(diagnosis: Diagnosis) -> list[FlameChart]:
    """A chart for each graph of samples; [] where none were taken."""
    return [chart for flame in diagnosis.flames[:GRAPHS] if (chart := _chart(flame)) is not None]


def _chart(flame: Flame) -> FlameChart | None:
    fitting = [frame for frame in flame.frames if _fits(frame, flame)]
    frames = sorted(fitting, key=lambda frame: -frame.ms)[:FRAMES]
    if not frames or flame.mean_ms < LEAST:
        return None
    frames.sort(key=lambda frame: (frame.depth, frame.start_ms))
    compared = flame.against is not None
    against = f", compared with {plain(flame.against)}" if flame.against else ""
    return FlameChart(
        title=f"Rank {flame.rank}, {plain(flame.which)}{against}",
        description=(
            f"{words.count(flame.samples, 'stack sample')} from {words.count(flame.steps, 'step')}, "
            f"{words.milliseconds(flame.mean_ms)} each on average. "
            "Callers are above what they call; width is time per step; the order is that of the program, not of time. "
            "Ranks are sampled at different moments, so only their shares can be compared."
        ),
        height=(max(frame.depth for frame in frames) + 1) * ROW,
        row=ROW - 1,
        bars=[_bar(frame, flame) for frame in frames],
        x_ticks=[
            Tick(percent_of(value, flame.mean_ms), words.strip_zeros(words.milliseconds(value)))
            for value in nice_ticks(flame.mean_ms, 5)
        ],
        rows=_rows(frames, flame),
        compared=compared,
    )


def _fits(frame: FlameFrame, flame: Flame) -> bool:
    """Whether it can be drawn: a report may have been written by anybody."""
    known = 0 <= frame.place < len(flame.places) and 0 <= frame.depth < ROW * 4
    return known and frame.ms > 0 and 0 <= frame.start_ms <= flame.mean_ms


def _bar(frame: FlameFrame, flame: Flame) -> FlameBar:
    width = percent_of(min(frame.ms, flame.mean_ms - frame.start_ms), flame.mean_ms)
    name = _name(frame, flame)
    title = f"{name}: {words.milliseconds(frame.ms)} per step ({words.percent(frame.ms / flame.mean_ms)})"
    if frame.beyond_ms is not None:
        title += f", {_beyond(frame.beyond_ms)} than {plain(flame.against or '')}"
    return FlameBar(
        x=percent_of(frame.start_ms, flame.mean_ms),
        width=max(width, 0.05),
        y=frame.depth * ROW,
        heat=sum((frame.beyond_ms or 0.0) >= part * flame.mean_ms for part in HEAT),
        label=_cut(name, int(width * LETTERS_PER_CENT)) if width >= LABELLED else "",
        title=title,
    )


def _name(frame: FlameFrame, flame: Flame) -> str:
    line = flame.places[frame.place]
    return plain(f"{line.function} {basename(line.file)}:{line.line}")


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: max(most - 1, 1)]}…"


def _beyond(ms: float) -> str:
    return f"{words.milliseconds(abs(ms))} {'more' if ms >= 0 else 'less'}"


def _rows(frames: Sequence[FlameFrame], flame: Flame) -> list[tuple[str, str, str]]:
    """For whoever cannot point at a frame: those that differ most, or are widest."""
    order = sorted(frames, key=lambda frame: (-(frame.beyond_ms or 0.0), -frame.ms))
    return [
        (
            f"{'· ' * frame.depth}{_name(frame, flame)}",
            words.milliseconds(frame.ms),
            "" if frame.beyond_ms is None else _beyond(frame.beyond_ms),
        )
        for frame in sorted(order[:ROWS], key=lambda frame: (frame.start_ms, frame.depth))
    ]
