"""From the measured step time to what it could be."""

from __future__ import annotations

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.report import words
from ddpdoctor.report.charts.scale import percent_of


class WaterfallRow(msgspec.Struct, frozen=True, kw_only=True):
    """A bar: a total at both ends, a saving between them. Positions in per cent of the measured step time."""

    label: str
    kind: str
    """"measured", "saving" or "goal"."""
    x: float
    width: float
    value: str
    rule: str | None = None
    whisker: tuple[float, float] | None = None
    """From where to where the saving's end may lie, nine times in ten."""


def waterfall(diagnosis: Diagnosis) -> list[WaterfallRow]:
    """Rows from the measured time downwards; empty where no saving is known.

    The first bar is the measured step time, bars with a rule (and those between two totals) are
    savings, a last bar without a rule is what is left.
    """
    bars = [bar for bar in diagnosis.waterfall if bar.ms == bar.ms]
    if len(bars) < 2 or bars[0].ms <= 0:
        return []
    whole = left = bars[0].ms
    rows = [
        WaterfallRow(label=bars[0].label, kind="measured", x=0, width=100, value=words.milliseconds(whole))
    ]
    last = bars[-1] if bars[-1].rule is None else None
    for bar in bars[1 : len(bars) - (last is not None)]:
        saved = min(abs(bar.ms), left)
        ends_ms = bar.range_ms and [max(0.0, left - end_ms) for end_ms in bar.range_ms]
        left -= saved
        rows.append(
            WaterfallRow(
                label=bar.label,
                kind="saving",
                x=percent_of(left, whole),
                width=percent_of(saved, whole),
                value=f"−{words.milliseconds(saved)}",
                rule=bar.rule,
                whisker=None
                if not ends_ms
                else (percent_of(ends_ms[1], whole), percent_of(ends_ms[0], whole)),
            )
        )
    if len(rows) < 2:
        return []
    goal = min(last.ms, whole) if last else left
    label = last.label if last else "could be"
    rows.append(
        WaterfallRow(
            label=label, kind="goal", x=0, width=percent_of(goal, whole), value=words.milliseconds(goal)
        )
    )
    return rows
