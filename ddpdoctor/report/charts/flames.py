"""Flame graphs of stack samples. Callers are at the top, widths are times per step. Frames that take longer than on the typical rank
are coloured."""

from __future__ import annotations

from collections.abc import Sequence
from posixpath import basename
from types import SimpleNamespace

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, Flame, FlameFrame
from ddpdoctor.measure.places import function_name
from ddpdoctor.plain import plain
from ddpdoctor.report import words
from ddpdoctor.report.charts.scale import NEGLIGIBLE, Tick, nice_ticks, percent_of

MAX_GRAPHS = 3
"""Maximum number of flame graphs."""
MAX_FRAMES = 160
"""Maximum number of frames of a graph; the widest are kept."""
ROW_HEIGHT = 18
"""Height of a frame, in pixels."""
MIN_LABELLED_PERCENT = 7.0
"""Minimum width of a frame with a label, in per cent of the graph's width."""
CHARACTERS_PER_PERCENT = 1.05
"""Characters that fit into 1 % of a desktop page's width. On narrower screens the label is clipped."""
TABLE_ROWS = 12
"""Rows of the table below a graph."""
HEAT_SHARES = (0.02, 0.05, 0.10, 0.20)
"""Lower bounds of the colours: excess over the same frame of the typical rank, as a share of the step."""


class FlameBar(msgspec.Struct, frozen=True):
    """A frame: x and width in per cent of the graph's width, y in pixels from the top."""

    x: float
    width: float
    y: int
    heat: int
    """Index of the colour, 0 (no longer than on the typical rank) to ``len(HEAT_SHARES)``."""
    label: str
    """"" if the frame is too narrow."""
    title: str


def flames(diagnosis: Diagnosis) -> list[SimpleNamespace]:
    """One chart per flame graph; [] without stack samples."""
    return [chart for flame in diagnosis.flames[:MAX_GRAPHS] if (chart := _chart(flame)) is not None]


def _chart(flame: Flame) -> SimpleNamespace | None:
    valid_frames = [frame for frame in flame.frames if _is_valid(frame, flame)]
    frames = sorted(valid_frames, key=lambda frame: -frame.ms)[:MAX_FRAMES]
    if not frames or flame.mean_ms < NEGLIGIBLE:
        return None
    frames.sort(key=lambda frame: (frame.depth, frame.start_ms))
    compared = flame.against is not None
    against = f", compared with {plain(flame.against)}" if flame.against else ""
    return SimpleNamespace(
        title=f"Rank {flame.rank}, {plain(flame.which)}{against}",
        description=(
            f"{words.count(flame.samples, 'stack sample')} from {words.count(flame.steps, 'step')}, "
            f"{words.milliseconds(flame.mean_ms)} each on average. "
            "Callers are above the functions they call; width is time per step; frames are in the order of the program, not of time. "
            "Ranks are sampled at different moments, so only their shares of time can be compared."
        ),
        height=(max(frame.depth for frame in frames) + 1) * ROW_HEIGHT,
        row=ROW_HEIGHT - 1,
        bars=[_bar(frame, flame) for frame in frames],
        x_ticks=[
            Tick(percent_of(value, flame.mean_ms), words.strip_zeros(words.milliseconds(value)))
            for value in nice_ticks(flame.mean_ms, 5)
        ],
        # (frame, time per step, difference to the typical rank)
        rows=_rows(frames, flame),
        compared=compared,
    )


def _is_valid(frame: FlameFrame, flame: Flame) -> bool:
    """Whether the frame's values are valid. They may not be in a diagnosis from a file."""
    known = 0 <= frame.place < len(flame.places) and 0 <= frame.depth < ROW_HEIGHT * 4
    return known and frame.ms > 0 and 0 <= frame.start_ms <= flame.mean_ms


def _bar(frame: FlameFrame, flame: Flame) -> FlameBar:
    width = percent_of(min(frame.ms, flame.mean_ms - frame.start_ms), flame.mean_ms)
    name = _name(frame, flame)
    max_length = int(width * CHARACTERS_PER_PERCENT)
    label = name if len(name) <= max_length else f"{name[: max(max_length - 1, 1)]}…"
    title = f"{name}: {words.milliseconds(frame.ms)} per step ({words.percent(frame.ms / flame.mean_ms)})"
    if frame.beyond_ms is not None:
        title += f", {_difference_text(frame.beyond_ms)} than {plain(flame.against or '')}"
    return FlameBar(
        x=percent_of(frame.start_ms, flame.mean_ms),
        width=max(width, 0.05),
        y=frame.depth * ROW_HEIGHT,
        heat=sum((frame.beyond_ms or 0.0) >= part * flame.mean_ms for part in HEAT_SHARES),
        label=label if width >= MIN_LABELLED_PERCENT else "",
        title=title,
    )


def _name(frame: FlameFrame, flame: Flame) -> str:
    line = flame.places[frame.place]
    return plain(f"{function_name(line.function)} {basename(line.file)}:{line.line}")


def _difference_text(ms: float) -> str:
    return f"{words.milliseconds(abs(ms))} {'more' if ms >= 0 else 'less'}"


def _rows(frames: Sequence[FlameFrame], flame: Flame) -> list[tuple[str, str, str]]:
    """The graph as a table of the frames with the largest excess, then the longest time."""
    order = sorted(frames, key=lambda frame: (-(frame.beyond_ms or 0.0), -frame.ms))
    return [
        (
            f"{'· ' * frame.depth}{_name(frame, flame)}",
            words.milliseconds(frame.ms),
            "" if frame.beyond_ms is None else _difference_text(frame.beyond_ms),
        )
        for frame in sorted(order[:TABLE_ROWS], key=lambda frame: (frame.start_ms, frame.depth))
    ]
