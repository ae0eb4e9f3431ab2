"""Potential savings per step: bars from the measured step time down to the estimate with all findings fixed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, WaterfallBar
from ddpdoctor.report import words
from ddpdoctor.report.charts.scale import LEAST, percent_of

BARS = 48
"""Most savings with their own bar; smaller ones share one."""

_SIGNS = {"saving": "−", "bound": "≤ "}


class WaterfallRow(msgspec.Struct, frozen=True, kw_only=True):
    """A bar for the template. Positions in per cent of the measured step time."""

    label: str
    kind: str
    """"measured", "saving", "bound" (at most this can be saved) or "goal"."""
    x: float
    width: float
    value: str
    rule: str | None = None
    whisker: tuple[float, float] | None = None
    """90 % interval of the saving's end."""


class WaterfallData(msgspec.Struct, frozen=True, kw_only=True):
    """A bar in milliseconds, for SVG and plotly."""

    label: str
    kind: str
    """"measured", "saving", "bound" (at most this can be saved) or "goal"."""
    from_ms: float
    ms: float
    rule: str | None = None
    ends_ms: list[float] | None = None
    """90 % interval of the saving's end."""

    @property
    def value(self) -> str:
        return f"{_SIGNS.get(self.kind, '')}{words.milliseconds(self.ms)}"


def waterfall_data(diagnosis: Diagnosis) -> list[WaterfallData]:
    """Bars from the measured step time downwards; [] if no saving is known.

    The first bar is the measured step time. A last bar without a rule is the remaining time; all between are savings.
    """
    bars = [bar for bar in diagnosis.waterfall if bar.ms == bar.ms]
    if len(bars) < 2 or bars[0].ms < LEAST:
        return []
    whole = left = bars[0].ms
    bars_ms = [WaterfallData(label=bars[0].label, kind="measured", from_ms=0.0, ms=whole)]
    last = bars[-1] if bars[-1].rule is None else None
    for bar in _few(bars[1 : len(bars) - (last is not None)]):
        saved = min(abs(bar.ms), left)
        ends_ms = bar.range_ms and [max(0.0, left - end_ms) for end_ms in reversed(bar.range_ms)]
        left -= saved
        bars_ms.append(
            WaterfallData(
                label=bar.label,
                kind="bound" if bar.at_most else "saving",
                from_ms=left,
                ms=saved,
                rule=bar.rule,
                ends_ms=ends_ms,
            )
        )
    if len(bars_ms) < 2:
        return []
    goal_ms = min(last.ms, whole) if last else left
    return [
        *bars_ms,
        WaterfallData(
            label=last.label if last else "without these, at best", kind="goal", from_ms=0.0, ms=goal_ms
        ),
    ]


def _few(savings: Sequence[WaterfallBar]) -> list[WaterfallBar]:
    more = savings[BARS:]
    rest = [WaterfallBar(f"{len(more):,} more", sum(abs(bar.ms) for bar in more))] if more else []
    return [*savings[:BARS], *rest]


def waterfall(diagnosis: Diagnosis) -> list[WaterfallRow]:
    """The rows of :func:`waterfall_data`."""
    bars_ms = waterfall_data(diagnosis)
    return [
        WaterfallRow(
            label=fall.label,
            kind=fall.kind,
            x=percent_of(fall.from_ms, bars_ms[0].ms),
            width=percent_of(fall.ms, bars_ms[0].ms),
            value=fall.value,
            rule=fall.rule,
            whisker=None
            if not fall.ends_ms
            else (percent_of(fall.ends_ms[0], bars_ms[0].ms), percent_of(fall.ends_ms[1], bars_ms[0].ms)),
        )
        for fall in bars_ms
    ]
